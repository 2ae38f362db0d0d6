"""The smallest architecture of every family of timm: a family is a module of `timm.models`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import timm
import torch
from timm.models import _registry
from torch import nn

from zoo.check import Architecture, Inputs

# The smallest of each family of timm 1.0.31, and others with norms that it lacks.
_NAMES = """
beit_base_patch16_224 caformer_s18 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
cpubone_nano crossvit_tiny_240 cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deepseek_vit_412m
deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1
efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim_dw
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 gmlp_ti16_224
halonet_h1 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto
inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception
levit_128s lowformer_b0 maxvit_nano_rw_256 mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs
mvitv2_tiny naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny nextvit_small pit_ti_224
pnasnet5large poolformerv2_s12 pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050
repvit_m1 res2next50 resnest14d resnetv2_18 rexnet_100 sam2_hiera_tiny samvit_base_patch16_224
selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 test_byobnet test_coatnet
test_convnext test_convnext2 test_efficientnet test_mambaout test_nfnet test_resnet test_vit
test_vit2 test_vit_relpos tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11
visformer_tiny vit_medium_patch16_reg4_gap_256 vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224
vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p8_224
"""
_SIZES = (64, 128)
_OWN_SIZE = ("crossvit",)  # accepts a smaller size when built, then fails


def architectures() -> Iterator[Architecture]:
    """The listed ones of each family; the first of a family without a listed one."""
    known = set(_NAMES.split())
    families: dict[str, list[str]] = {}
    for name in timm.list_models():
        families.setdefault(_registry._model_to_module[name], []).append(name)
    for names in families.values():
        for name in [name for name in names if name in known] or names[:1]:
            yield Architecture("timm", name, partial(_build, name), _inputs)


def _build(name: str) -> nn.Module:
    if not name.startswith(_OWN_SIZE):
        try:
            return timm.create_model(name, num_classes=5, img_size=_SIZES[0])
        except (TypeError, ValueError, AssertionError, RuntimeError):
            pass  # no such argument, or no size but its own
    return timm.create_model(name, num_classes=5)


def _inputs(model: nn.Module) -> Inputs:
    """The smallest images that the model takes."""
    for size in _SIZES:
        x = torch.rand(2, 3, size, size)
        try:
            with torch.no_grad():
                copy.deepcopy(model).train()(x)
        except (
            RuntimeError,
            ValueError,
            AssertionError,
            IndexError,
        ):
            # Most are about shapes.
            continue
        return {"x": x}
    return {"x": torch.rand(2, *model.default_cfg["input_size"])}  # type: ignore[index]
