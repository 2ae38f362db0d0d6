"""Every architecture of `torchvision.models.list_models()`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torchvision import models

from zoo.check import Architecture, Inputs

_SMALL_IMAGES = {"weights_backbone": None, "min_size": 64, "max_size": 96}
_FEW_BOXES = {
    "box_detections_per_img": 5,
    "rpn_post_nms_top_n_train": 20,
    "rpn_post_nms_top_n_test": 20,
}
# Parts of names -> arguments of the constructor, and the height and width of images.
_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any], int], ...] = (
    (("vit_b", "vit_l"), {"image_size": 64}, 64),
    (("vit_h",), {"image_size": 56}, 56),
    (("maxvit",), {"input_size": (224, 224)}, 224),
    (("googlenet",), {"init_weights": False}, 64),
    (("inception",), {"init_weights": False}, 299),
    (("deeplabv3", "fcn_", "lraspp"), {"weights_backbone": None}, 64),
    (("ssd",), {"weights_backbone": None, "detections_per_img": 5}, 64),
    (
        ("retinanet", "fcos"),
        {**_SMALL_IMAGES, "detections_per_img": 5, "topk_candidates": 20},
        64,
    ),
    (("rcnn",), {**_SMALL_IMAGES, **_FEW_BOXES}, 64),
)
_FULL_VIDEO, _VIDEO = ("mvit", "s3d"), ("swin3d", "r3d", "mc3", "r2plus1d")
_DETECTION = ("rcnn", "retinanet", "fcos", "ssd")


def architectures() -> Iterator[Architecture]:
    """Every architecture by name, with 5 classes and small images."""
    for name in models.list_models():
        yield Architecture(
            "torchvision", name, partial(_build, name), partial(_inputs, name)
        )


def _options(name: str) -> tuple[dict[str, Any], int]:
    for words, arguments, size in _OPTIONS:
        if any(word in name for word in words):
            return arguments, size
    return {}, 64


def _build(name: str) -> nn.Module:
    if name.startswith("raft"):
        return models.get_model(name, weights=None)
    return models.get_model(name, weights=None, num_classes=5, **_options(name)[0])


def _inputs(name: str, model: nn.Module) -> Inputs:
    _, size = _options(name)
    if name.startswith("raft"):
        image1, image2 = torch.rand(2, 1, 3, 128, 128)
        return {"image1": image1, "image2": image2, "num_flow_updates": 2}
    if any(word in name for word in _DETECTION):
        return _annotated_images(size)
    x = torch.rand(1 if name.startswith("maxvit") else 2, 3, size, size)
    if name.startswith(_VIDEO):
        x = torch.rand(2, 3, 8, 32, 32)
    elif name.startswith(_FULL_VIDEO):
        x = torch.rand(1, 3, 16, 224, 224)
    return {next(iter(signature(model.forward).parameters)): x}


def _annotated_images(size: int) -> Inputs:
    masks = torch.zeros(2, size, size, dtype=torch.uint8)
    masks[:, 10:40, 10:30] = 1
    keypoints = 10 + 40 * torch.rand(2, 17, 3)
    keypoints[..., 2] = 1
    target = {
        "boxes": torch.tensor([[4.0, 6.0, 30.0, 40.0], [20.0, 10.0, 60.0, 50.0]]),
        "labels": torch.tensor([1, 1]),
        "masks": masks,
        "keypoints": keypoints,
    }
    return {"images": [*torch.rand(2, 3, size, size)], "targets": [target, target]}
