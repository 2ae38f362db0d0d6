"""Architectures of other libraries and of the bench itself, with random weights.

Libraries are imported inside functions, so that the command line can list models without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def from_torchvision(name: str, **options: Any) -> Any:
    """A model of torchvision, by name."""
    from torchvision.models import get_model

    return get_model(name, **options)


def resnet18_cifar() -> nn.Module:
    """A ResNet-18 with the stem of He et al. 2015 (arXiv:1512.03385): no stride, no max pooling."""
    net = from_torchvision("resnet18", num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net


def vit_b_16() -> nn.Module:
    """A ViT-B/16 whose head does not start at zero."""
    net = from_torchvision("vit_b_16")
    # torchvision initialises the head to zero, so all gradients of the body would be zero, too.
    nn.init.trunc_normal_(net.heads.head.weight, std=0.02)
    return net


def encoder() -> nn.Module:
    """An encoder of 6 layers, 256 wide, with 8 heads; the rest is torch's default."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, batch_first=True), 6)


class Part(nn.Module):
    """Call a network of keyword arguments by position, and return one of its results.

    Args:
        net: the network.
        result: the attribute of the network's output to return.
        *names: the names of the arguments, in positional order.
    """

    def __init__(self, net: nn.Module, result: str, *names: str) -> None:
        super().__init__()
        self.net = net
        self.result = result
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """The result for the named arguments."""
        arguments = dict(zip(self.names, inputs, strict=True))
        return getattr(self.net(**arguments), self.result)


def bert_base() -> nn.Module:
    """BERT-base: logits of the masked tokens, (N, T) -> (N, T, 30522)."""
    from transformers import BertConfig, BertForMaskedLM

    return Part(BertForMaskedLM(BertConfig()), "logits", "input_ids")


def gpt2() -> nn.Module:
    """GPT-2: logits of the next tokens, (N, T) -> (N, T, 50257)."""
    # In transformers 5 its forward synchronises with the GPU once, to look for packed sequences.
    from transformers import GPT2Config, GPT2LMHeadModel

    return Part(GPT2LMHeadModel(GPT2Config(use_cache=False)), "logits", "input_ids")


def llama(**sizes: Any) -> nn.Module:
    """A Llama of these sizes (see LlamaConfig): (N, T) -> (N, T, vocab_size)."""
    # It synchronises with the GPU once, as GPT-2 does.
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes |= {"use_cache": False, "attn_implementation": "sdpa"}
    return Part(LlamaForCausalLM(LlamaConfig(**sizes)), "logits", "input_ids")


def t5_small(**sizes: Any) -> nn.Module:
    """T5-small, or a T5 of other sizes (see T5Config)."""
    from transformers import T5Config, T5ForConditionalGeneration

    net = T5ForConditionalGeneration(T5Config(**sizes, use_cache=False))
    return Part(net, "logits", "input_ids", "decoder_input_ids")


def unet2d(**sizes: Any) -> nn.Module:
    """UNet2DModel of diffusers, with its default sizes or others."""
    from diffusers import UNet2DModel

    net: Any = UNet2DModel(**sizes)  # diffusers imports its classes lazily, unseen by type checkers
    return Part(net, "sample", "sample", "timestep")


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
        """(N, inputs, D, H, W) to (N, classes, D, H, W); all stages but the first halve D, H, W."""
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
