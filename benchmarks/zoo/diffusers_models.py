"""Architectures of diffusers, each narrow and shallow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from zoo.check import Architecture, Inputs

_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_CODER = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "latent_channels": 4,
    **_BLOCKS,
}
_UNET = {"cross_attention_dim": 8, "attention_head_dim": 4, **_BLOCKS}
_CROSS_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
_JOINT = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}


_GENERATOR = torch.Generator().manual_seed(0)  # so that every run has the same inputs


def _rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_GENERATOR)


def _images(channels: int, size: int = 16) -> Tensor:
    return _rand(2, channels, size, size)


def _tokens(width: int, length: int = 4) -> Tensor:
    return _rand(2, length, width)


# Name -> configuration, and inputs of the forward.
_MODELS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "AutoencoderKL": (_CODER, {"sample": _images(3)}),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 8,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        {
            "hidden_states": _images(4, 8),
            "encoder_hidden_states": _tokens(8),
            "timestep": torch.tensor([0.3, 0.6]),
        },
    ),
    "ControlNetModel": (
        {
            "down_block_types": _CROSS_DOWN,
            "conditioning_embedding_out_channels": (8, 16),
            **_UNET,
        },
        {
            "sample": _images(4, 8),
            "timestep": 5,
            "encoder_hidden_states": _tokens(8),
            "controlnet_cond": _images(3),
        },
    ),
    "DiTTransformer2DModel": (
        {**_JOINT, "sample_size": 8, "in_channels": 4, "norm_num_groups": 4},
        {
            "hidden_states": _images(4, 8),
            "timestep": torch.tensor([3, 5]),
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    "FluxTransformer2DModel": (
        {
            **_JOINT,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (2, 2, 4),
        },
        {
            "hidden_states": _tokens(4, 16),
            "encoder_hidden_states": _tokens(8),
            "pooled_projections": _rand(2, 8),
            "timestep": torch.tensor([0.3, 0.6]),
            "img_ids": _rand(16, 3),
            "txt_ids": _rand(4, 3),
        },
    ),
    "LTXVideoTransformer3DModel": (
        {
            **_JOINT,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "caption_channels": 8,
        },
        {
            "hidden_states": _tokens(4, 16),
            "encoder_hidden_states": _tokens(8),
            "timestep": torch.tensor([3, 5]),
            "encoder_attention_mask": torch.ones(2, 4),
            "num_frames": 4,
            "height": 2,
            "width": 2,
        },
    ),
    "PixArtTransformer2DModel": (
        {
            **_JOINT,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 8,
            "caption_channels": 8,
            "cross_attention_dim": 16,
            "norm_num_groups": 4,
            "use_additional_conditions": False,
        },
        {
            "hidden_states": _images(4, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": _tokens(8),
        },
    ),
    "SD3Transformer2DModel": (
        {
            **_JOINT,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "caption_projection_dim": 16,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "qk_norm": "rms_norm",
        },
        {
            "hidden_states": _images(4, 8),
            "encoder_hidden_states": _tokens(8),
            "pooled_projections": _rand(2, 8),
            "timestep": torch.tensor([3, 5]),
        },
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (32, 32),
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 64,
        },
        {"sample": _rand(2, 2, 32), "timestep": 5},
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 8,
            "down_block_types": _CROSS_DOWN,
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            **_UNET,
        },
        {"sample": _images(4, 8), "timestep": 5, "encoder_hidden_states": _tokens(8)},
    ),
    "UNet2DModel": (
        {
            "sample_size": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            **_BLOCKS,
        },
        {"sample": _images(3, 8), "timestep": 5},
    ),
    "VQModel": ({**_CODER, "num_vq_embeddings": 16}, {"sample": _images(3)}),
    "WanTransformer3DModel": (
        {
            **_JOINT,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 8,
            "freq_dim": 8,
            "ffn_dim": 16,
            "rope_max_seq_len": 32,
        },
        {
            "hidden_states": _rand(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": _tokens(8),
        },
    ),
}


def architectures() -> Iterator[Architecture]:
    """Every architecture listed here, sorted by name."""
    for name in sorted(_MODELS):
        yield Architecture(
            "diffusers", name, partial(_build, name), partial(_inputs, name)
        )


def _build(name: str) -> nn.Module:
    return getattr(diffusers, name)(**_MODELS[name][0])


def _inputs(name: str, model: nn.Module) -> Inputs:
    return _MODELS[name][1]
