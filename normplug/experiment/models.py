"""The experiment's two kinds of network: torchvision's, with sizes for small images."""

from __future__ import annotations

import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer, get_model, list_models

from normplug.lightning import norm_layers

SMALL_IMAGE = 64  # pixels; up to here an ImageNet stem (stride 4) would throw most of it away


def resnet(
    arch: str, *, num_classes: int, image_size: int, small_stem: bool | None = None
) -> nn.Module:
    """A torchvision ResNet, with random weights.

    Args:
        arch: "resnet18", "resnet50", or another of torchvision's ResNets.
        num_classes: outputs.
        image_size: height and width of the images, in pixels.
        small_stem: start with a 3x3 convolution of stride 1 and no max-pool, as in He et al. 2015
            (arXiv:1512.03385), section 4.2. None: for images of at most 64 pixels.

    Returns:
        (N, 3, H, W) -> (N, num_classes).

    Raises:
        ValueError: `arch` is not a ResNet.
    """
    known = list_models(torchvision.models, include=["resne*", "wide_resnet*"])
    if arch not in known:
        raise ValueError(
            f"normplug.experiment: model.arch must be one of {', '.join(known)}; got {arch!r}."
        )
    net = get_model(arch, num_classes=num_classes)
    if small_stem or (small_stem is None and image_size <= SMALL_IMAGE):
        conv = nn.Conv2d(3, net.conv1.out_channels, 3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        net.conv1, net.maxpool = conv, nn.Identity()
    return net


def vit(
    *,
    num_classes: int,
    image_size: int,
    patch_size: int | None = None,
    hidden_dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: int = 2,
    dropout: float = 0.0,
) -> VisionTransformer:
    """A small torchvision VisionTransformer (arXiv:2010.11929), pre-norm, with random weights.

    Its blocks call their LayerNorms in eval too, unlike `nn.TransformerEncoderLayer`'s.

    Args:
        num_classes: outputs.
        image_size: height and width of the images, in pixels.
        patch_size: side of a patch, in pixels. None: the divisor of `image_size`, at least 2, that
            is nearest to an eighth of it.
        hidden_dim: width of the residual stream.
        depth: blocks.
        heads: attention heads.
        mlp_ratio: hidden width of the MLP, as a multiple of `hidden_dim`.
        dropout: probability, in attention and MLP.

    Returns:
        (N, 3, H, W) -> (N, num_classes).

    Raises:
        ValueError: `patch_size` does not divide `image_size`, or `heads` does not divide
            `hidden_dim`.
    """
    if patch_size is None:
        divisors = [d for d in range(2, image_size + 1) if image_size % d == 0]
        patch_size = min(divisors, key=lambda d: abs(d - image_size / 8), default=1)
    if image_size % patch_size:
        raise ValueError(
            f"normplug.experiment: model.patch_size must divide the image size {image_size}; "
            f"got {patch_size}."
        )
    if hidden_dim % heads:
        raise ValueError(
            f"normplug.experiment: model.heads must divide model.hidden_dim={hidden_dim}; "
            f"got {heads}."
        )
    net = VisionTransformer(
        image_size=image_size,
        patch_size=patch_size,
        num_layers=depth,
        num_heads=heads,
        hidden_dim=hidden_dim,
        mlp_dim=mlp_ratio * hidden_dim,
        dropout=dropout,
        attention_dropout=dropout,
        num_classes=num_classes,
    )
    # torchvision starts the head at zero: then the first step has no gradient behind the head.
    nn.init.trunc_normal_(net.heads.head.weight, std=0.02)
    return net


@torch.no_grad()
def scale_norm_weights(net: nn.Module, gamma0: float) -> None:
    """Multiply the weight of every norm that a swap takes by `gamma0`.

    This makes the control arm of a target variance tv: mode standard with gamma0 = sqrt(tv) starts
    as the same function, so the two arms differ in their parametrisation alone.
    """
    for _, module in norm_layers(net):
        if isinstance(module.weight, nn.Parameter):
            module.weight.mul_(gamma0)
