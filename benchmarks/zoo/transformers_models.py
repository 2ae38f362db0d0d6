"""Architectures of transformers, each configured with two narrow layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from zoo.check import Architecture, Inputs

_TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
}
_PAIR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_SPEECH = {
    "apply_spec_augment": False,
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
}
_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_TEXT_AND_IMAGE = {
    "text_config": {
        k: v for k, v in _TINY.items() if k not in ("image_size", "patch_size")
    },
    "vision_config": {
        k: v for k, v in _TINY.items() if k not in ("vocab_size", "use_cache")
    },
    "projection_dim": 16,
}
_WINDOWS = {
    "image_size": 32,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_PLAIN = """
albert beit bert bloom camembert canine cohere convbert ctrl data2vec-vision deberta-v2 deit
dinov2 distilbert dpt electra ernie esm falcon flaubert fnet gpt2 gpt_neox ijepa layoutlm llama
longformer mamba mobilebert mpnet mpt nystromformer olmo opt persimmon phi rembert roberta
roformer starcoder2 vit vit_mae vit_msn xlm xlm-roberta
"""
# Between them, they have every kind of RMSNorm.
_DECODERS = "gemma gemma2 gemma3_text glm4 gpt_oss mistral olmo2 phi3 qwen3"
# Name -> configuration on top of `_TINY`.
_BEYOND: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_PLAIN.split(), {}),
    **dict.fromkeys(_DECODERS.split(), {"head_dim": 8, "num_key_value_heads": 2}),
    **dict.fromkeys(
        ("bart", "blenderbot", "led", "m2m_100", "marian", "mbart", "pegasus"), _PAIR
    ),
    **dict.fromkeys(("hubert", "sew", "unispeech", "wav2vec2", "wavlm"), _SPEECH),
    **dict.fromkeys(("timesformer", "videomae", "vivit"), {"num_frames": 4}),
    **dict.fromkeys(("codegen", "gptj"), {"rotary_dim": 4}),
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {**_PAIR, "attention_type": "original_full"},
    "detr": {**_PAIR, "num_queries": 5},
    "gemma4_text": {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "nemotron": {"num_key_value_heads": 4, "head_dim": 8},
    "speech_to_text": {**_PAIR, "input_feat_per_channel": 8, "conv_channels": 16},
    "squeezebert": {"embedding_size": 32},
    "stablelm": {"num_key_value_heads": 4},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "whisper": {
        **_PAIR,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
    },
    "yolos": {"image_size": [32, 32]},
}
# Name -> whole configuration.
_WHOLE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("convnext", "convnextv2", "dinov3_convnext", "poolformer"), _STAGES),
    **dict.fromkeys(("clip", "siglip"), _TEXT_AND_IMAGE),
    **dict.fromkeys(("swin", "swinv2"), _WINDOWS),
    **dict.fromkeys(("glpn", "segformer"), {}),
    **dict.fromkeys(("pvt", "pvt_v2"), {"image_size": 32}),
    "bit": {**_STAGES, "embedding_size": 16, "num_groups": 4},
    "cvt": {"depth": [1, 2, 3]},
    "efficientnet": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.5,
        "hidden_dim": 320,
    },
    "focalnet": {"embed_dim": 16, "depths": [1, 1, 2, 1], "image_size": 32},
    "hiera": {
        "image_size": [32, 32],
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 4, 8],
    },
    "levit": {"image_size": 64},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48],
    },
    "prophetnet": {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    "regnet": {**_STAGES, "embedding_size": 16, "groups_width": 8},
    "resnet": {**_STAGES, "embedding_size": 16},
    "swiftformer": {"embed_dims": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
    "xlnet": {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
}
_CONFIGURATIONS = {name: {**_TINY, **more} for name, more in _BEYOND.items()} | _WHOLE


def architectures() -> Iterator[Architecture]:
    """Every architecture listed here, sorted by name."""
    for name in sorted(_CONFIGURATIONS):
        yield Architecture("transformers", name, partial(_build, name), _inputs)


def _build(name: str) -> nn.Module:
    return AutoModel.from_config(AutoConfig.for_model(name, **_CONFIGURATIONS[name]))


def _inputs(model: nn.Module) -> Inputs:
    config: Any = model.config
    size = 32 if getattr(config, "image_size", None) in (32, [32, 32]) else 64
    speech = (32, 8) if config.model_type == "speech_to_text" else (8, 32)
    made = {
        "input_ids": torch.randint(3, 99, (2, 16)),
        "pixel_values": torch.rand(2, 3, size, size),
        "input_values": torch.rand(2, 1600),
        "input_features": torch.rand(2, *speech),
    }
    inputs = {str(model.main_input_name): made[str(model.main_input_name)]}
    if hasattr(config, "num_frames"):
        inputs["pixel_values"] = torch.rand(2, config.num_frames, 3, 32, 32)
    if hasattr(config, "vision_config"):
        inputs = {
            "input_ids": made["input_ids"],
            "pixel_values": torch.rand(2, 3, 32, 32),
        }
    if config.is_encoder_decoder and "pixel_values" not in inputs:
        inputs["decoder_input_ids"] = made["input_ids"][:, :8]
    return inputs
