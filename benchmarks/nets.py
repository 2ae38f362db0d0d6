"""The networks whose training steps are measured, with random weights and batches.

Each can be given to the user's command: `python -m normplug.bench model benchmarks/nets.py:gpt2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normplug.bench.models import Loss
from normplug.bench.targets import cross_entropy

Target = tuple[nn.Module, Any, Loss]


def images(
    name: str, batch: int, size: int = 224, channels_last: bool = True, model: Any = None
) -> Target:
    """A classifier of torchvision, or `model`."""
    model = model or import_module("torchvision.models").get_model(name)
    labels = torch.randint(10 if size == 32 else 1000, (batch,))
    return _laid_out(model, (torch.randn(batch, 3, size, size), labels), channels_last)


def _laid_out(model: nn.Module, data: tuple[Tensor, ...], channels_last: bool) -> Target:
    if channels_last:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = formats[data[0].dim()]
        model = model.to(memory_format=last)
        data = (data[0].contiguous(memory_format=last), *data[1:])
    return model, data, cross_entropy


def _resnet18_cifar(batch: int) -> Target:
    """A ResNet-18 with the stem of He et al. 2015 (arXiv:1512.03385): no stride, no pooling."""
    net = import_module("torchvision.models").resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return images("", batch, 32, model=net)


def _vit_b_16(batch: int) -> Target:
    """A ViT-B/16 whose head does not start at zero, where the body would get no gradients."""
    net = import_module("torchvision.models").vit_b_16()
    nn.init.trunc_normal_(net.heads.head.weight, std=0.02)
    return images("", batch, channels_last=False, model=net)


def encoder(batch: int, length: int = 128, width: int = 256, layers: int = 6) -> Target:
    """An encoder with 8 heads; the rest is torch's default."""
    layer = nn.TransformerEncoderLayer(width, 8, batch_first=True)
    data = (torch.randn(batch, length, width), torch.randint(width, (batch, length)))
    return nn.TransformerEncoder(layer, layers), data, cross_entropy


def text(name: str, config: str, batch: int, length: int, target: int = 0, **sizes: Any) -> Target:
    """A language model of transformers; `target` is the length of a translation."""
    transformers = import_module("transformers")
    made = getattr(transformers, config)(**sizes)
    net = getattr(transformers, name)(made)
    arguments = [torch.randint(made.vocab_size, (batch, length))]
    if target:
        arguments.append(torch.randint(made.vocab_size, (batch, target)))
    labels = torch.randint(made.vocab_size, arguments[-1].shape)
    names = ("input_ids", "decoder_input_ids")
    return net, (*arguments, labels), partial(_logits_loss, names)


def _logits_loss(names: Sequence[str], model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    *inputs, labels = batch
    logits = model(**dict(zip(names, inputs, strict=False))).logits
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _unet2d(batch: int, size: int = 64, **sizes: Any) -> Target:
    """UNet2DModel of diffusers, which predicts the noise in images."""
    net = import_module("diffusers").UNet2DModel(**sizes)
    pictures, noise = torch.randn(2, batch, 3, size, size)
    model, data, _ = _laid_out(net, (pictures, torch.randint(1000, (batch,)), noise), True)
    return model, data, _noise_loss


def _noise_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    pictures, times, noise = batch
    return F.mse_loss(model(pictures, times).sample, noise)


class UNet3d(nn.Module):
    """A plain U-Net for volumes, like that of nnU-Net (Isensee et al. 2021, arXiv:1904.08128).

    Each stage has two convolutions, each with an InstanceNorm and a LeakyReLU. The encoder
    downsamples by strides of 2, the decoder upsamples by transposed convolutions.

    Args:
        inputs: channels of the input.
        classes: channels of the output.
        widths: channels of each stage, finest first.
    """

    def __init__(self, inputs: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.first = _stage(inputs, widths[0])
        self.down = nn.ModuleList(_stage(fine, coarse, stride=2) for fine, coarse in steps)
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(coarse, fine, 2, stride=2) for fine, coarse in reversed(steps)
        )
        self.merge = nn.ModuleList(_stage(2 * fine, fine) for fine, _ in reversed(steps))
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, D, H, W) to (N, classes, D, H, W)."""
        x = self.first(x)
        finer = []
        for down in self.down:
            finer.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((up(x), finer.pop()), 1))
        return self.head(x)


def _stage(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    blocks = []
    for channels, step in ((inputs, stride), (outputs, 1)):
        blocks += [
            nn.Conv3d(channels, outputs, 3, step, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(inplace=True),
        ]
    return nn.Sequential(*blocks)


def _nnunet3d(
    batch: int, size: int = 128, widths: Sequence[int] = (32, 64, 128, 256, 320, 320)
) -> Target:
    """Segmentation of volumes into three classes."""
    shape = (size,) * 3
    data = (torch.randn(batch, 1, *shape), torch.randint(3, (batch, *shape)))
    model, data, _ = _laid_out(UNet3d(1, 3, widths), data, True)
    return model, data, _voxel_loss


def _voxel_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    volumes, labels = batch
    return F.cross_entropy(model(volumes), labels)


class Net(NamedTuple):
    """How to make a network and a batch, the batch sizes to measure, and its library if any."""

    make: Callable[..., Target]
    batches: tuple[int, ...]
    library: str | None = "torchvision"


def _cnn(name: str, *batches: int) -> Net:
    return Net(partial(images, name), batches)


_LLAMA = {
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
_bert = partial(text, "BertForMaskedLM", "BertConfig", length=512)
_gpt2 = partial(text, "GPT2LMHeadModel", "GPT2Config", length=1024, use_cache=False)
_llama = partial(text, "LlamaForCausalLM", "LlamaConfig", length=2048, **_LLAMA)
_t5 = partial(text, "T5ForConditionalGeneration", "T5Config", length=512, target=128)
NETS = {
    "resnet50": _cnn("resnet50", 256, 32),
    "resnet18-cifar": Net(_resnet18_cifar, (512, 128)),
    "vit_b_16": Net(_vit_b_16, (128,)),
    "convnext_tiny": _cnn("convnext_tiny", 128),
    "efficientnet_b0": _cnn("efficientnet_b0", 128),
    "mobilenet_v3_large": _cnn("mobilenet_v3_large", 256),
    "regnet_y_1_6gf": _cnn("regnet_y_1_6gf", 128),
    "densenet121": _cnn("densenet121", 64),
    "swin_t": Net(partial(images, "swin_t", channels_last=False), (128,)),
    "encoder_6x256": Net(encoder, (64,), None),
    "bert_base": Net(_bert, (32,), "transformers"),
    "gpt2": Net(_gpt2, (16,), "transformers"),
    "llama_16x1024": Net(_llama, (8,), "transformers"),
    "t5_small": Net(_t5, (32,), "transformers"),
    "unet2d": Net(_unet2d, (16,), "diffusers"),
    "nnunet3d": Net(_nnunet3d, (2,), None),
}


def __getattr__(name: str) -> Callable[..., Target]:
    """Each network as a function with its usual batch."""
    if name not in NETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(NETS[name].make, batch=NETS[name].batches[0])
