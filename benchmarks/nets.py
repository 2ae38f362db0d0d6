"""The networks whose training steps are measured, with random weights and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Nothing of normplug is imported here: `turns.py` runs these networks with other checkouts of it.
Loss = Callable[[nn.Module, Any], Tensor]
Target = tuple[nn.Module, Any, Loss]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of logits (..., classes) for the last tensor of the batch."""
    *inputs, target = batch
    return F.cross_entropy(model(*inputs).flatten(0, -2), target.flatten())


def cross_entropy_of_images(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of logits (N, classes, ...) for the second tensor of the batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def layer(kind: type[nn.Module], sizes: Sequence[Any], *shape: int, batch: int) -> Target:
    """A small single layer, whose loss is the mean square of its outputs."""
    x = torch.randn(batch, *shape, requires_grad=True)
    return kind(*sizes), (x,), lambda model, batch: model(*batch).square().mean()


def images(
    name: str, batch: int, size: int = 224, channels_last: bool = True, model: Any = None
) -> Target:
    """A classifier of torchvision, or `model`."""
    model = model or import_module("torchvision.models").get_model(name)
    classes = 10 if size == 32 else 1000
    data = (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))
    if channels_last:
        model, data = laid_out(model, data, "channels_last")
    return model, data, cross_entropy


LAYOUTS = ("contiguous", "channels_last")


def laid_out(
    model: nn.Module, data: tuple[Tensor, ...], layout: str
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and its images, the first of `data`, in a memory layout of `LAYOUTS`."""
    images, *others = data
    memory_format = torch.contiguous_format
    if layout == "channels_last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        memory_format = formats[images.dim()]
    images = images.contiguous(memory_format=memory_format)
    return model.to(memory_format=memory_format), (images, *others)


def has_layouts(data: tuple[Tensor, ...]) -> bool:
    """Whether a batch has images or volumes, which have several memory layouts."""
    return data[0].dim() in (4, 5)


def _resnet18_cifar(batch: int) -> Target:
    """A ResNet-18 with the stem of He et al. 2015 (arXiv:1512.03385): no stride, no pooling."""
    net = import_module("torchvision.models").resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return images("", batch, 32, model=net)


def _frozen_resnet50(batch: int, size: int = 640) -> Target:
    """A detector's backbone: frozen norms, trained convolutions, and a loss on three scales."""
    frozen = import_module("torchvision.ops.misc").FrozenBatchNorm2d
    net = import_module("torchvision.models").resnet50(norm_layer=frozen)
    scales = {"layer2": "0", "layer3": "1", "layer4": "2"}
    body = import_module("torchvision.models._utils").IntermediateLayerGetter(net, scales)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(
            [each.float().square().mean() for each in model(*batch).values()]
        ).sum()

    data = (torch.randn(batch, 3, size, size),)
    return *laid_out(body, data, "channels_last"), loss


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


def text(
    name: str, config: str, batch: int, length: int, target: int = 0, **sizes: Any
) -> Target:
    """A language model of transformers; `target` is the length of a translation."""
    transformers = import_module("transformers")
    made = getattr(transformers, config)(**sizes)
    net = getattr(transformers, name)(made)
    lengths = {"input_ids": length} | ({"decoder_input_ids": target} if target else {})
    ids = [torch.randint(made.vocab_size, (batch, each)) for each in lengths.values()]
    data = (*ids, torch.randint_like(ids[-1], made.vocab_size))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, labels = batch
        logits = model(**dict(zip(lengths, inputs, strict=True))).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    return net, data, loss


def _unet2d(batch: int, size: int = 64, **sizes: Any) -> Target:
    """UNet2DModel of diffusers, which predicts the noise in images."""
    net = import_module("diffusers").UNet2DModel(**sizes)
    pictures, noise = torch.randn(2, batch, 3, size, size)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        pictures, times, noise = batch
        return F.mse_loss(model(pictures, times).sample, noise)

    data = (pictures, torch.randint(1000, (batch,)), noise)
    return *laid_out(net, data, "channels_last"), loss


def _dit_b_2(batch: int, **sizes: Any) -> Target:
    """A DiT-B/2 of diffusers (Peebles and Xie 2022, arXiv:2212.09748), on latents of 32 x 32."""
    chosen = {"num_attention_heads": 12, "attention_head_dim": 64, "num_layers": 12}
    net = import_module("diffusers").DiTTransformer2DModel(**chosen | sizes)
    latents, noise = torch.randn(2, batch, 4, 32, 32)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        latents, times, labels, noise = batch
        made = model(latents, timestep=times, class_labels=labels).sample
        return F.mse_loss(made, noise)

    times = torch.randint(1000, (batch,))
    labels = torch.randint(1000, (batch,))
    return net, (latents, times, labels, noise), loss


class UNet3d(nn.Module):
    """A plain U-Net for volumes, like nnU-Net's (Isensee et al. 2021, arXiv:1904.08128).

    It has a stage at this resolution, and a U-Net at half of it, between a stride of 2 and a
    transposed convolution. A stage is two convolutions, each with an InstanceNorm and a LeakyReLU.
    `widths` are the channels of the stages, finest first.
    """

    def __init__(self, inputs: int, widths: Sequence[int], stride: int = 1) -> None:
        super().__init__()
        width, *coarser = widths
        self.stage = _stage(inputs, width, stride)
        self.coarser: nn.Module | None = None
        if coarser:
            up = nn.ConvTranspose3d(coarser[0], width, 2, stride=2)
            self.coarser = nn.Sequential(UNet3d(width, coarser, 2), up)
            self.merge = _stage(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, D, H, W) to (N, widths[0], D / stride, H / stride, W / stride)."""
        x = self.stage(x)
        if self.coarser is None:
            return x
        return self.merge(torch.cat((self.coarser(x), x), 1))


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
    net = nn.Sequential(UNet3d(1, widths), nn.Conv3d(widths[0], 3, 1))
    return *laid_out(net, data, "channels_last"), cross_entropy_of_images


def timm_images(
    name: str, batch: int, channels_last: bool = True, **options: Any
) -> Target:
    """A classifier of timm."""
    net = import_module("timm").create_model(name, **options)
    return images("", batch, channels_last=channels_last, model=net)


def _inception_v3(batch: int) -> Target:
    """An Inception-v3 without its auxiliary classifier, whose loss is one more output."""
    make = import_module("torchvision.models").inception_v3
    return images("", batch, 299, model=make(aux_logits=False, init_weights=False))


def _r2plus1d(batch: int) -> Target:
    """A video classifier, on clips of 16 frames of 112 x 112 pixels."""
    net = import_module("torchvision.models.video").r2plus1d_18()
    data = torch.randn(batch, 3, 16, 112, 112), torch.randint(400, (batch,))
    return *laid_out(net, data, "channels_last"), cross_entropy


def _segformer(batch: int) -> Target:
    """A SegFormer-B2 (Xie et al. 2021, arXiv:2105.15203) that classifies images."""
    transformers = import_module("transformers")
    sizes = {"hidden_sizes": [64, 128, 320, 512], "depths": [3, 4, 6, 3]}
    net = transformers.SegformerForImageClassification(
        transformers.SegformerConfig(**sizes, num_labels=1000)
    )
    data = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return (
        net,
        data,
        lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
    )


class Net(NamedTuple):
    """How to make a network and a batch, and the batch sizes to measure."""

    make: Callable[..., Target]
    batches: tuple[int, ...]


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
_QWEN3 = {
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "vocab_size": 32000,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
_qwen3 = partial(text, "Qwen3ForCausalLM", "Qwen3Config", length=2048, **_QWEN3)
_QWEN3_NEXT = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_hidden_layers": 4,
    "mlp_only_layers": [0, 1, 2, 3],  # no experts
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "vocab_size": 32000,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
_qwen3_next = partial(
    text, "Qwen3NextForCausalLM", "Qwen3NextConfig", length=512, **_QWEN3_NEXT
)
_t5 = partial(text, "T5ForConditionalGeneration", "T5Config", length=512, target=128)
NETS = {
    "resnet50": Net(partial(images, "resnet50"), (256, 32)),
    "resnet18-cifar": Net(_resnet18_cifar, (512, 128)),
    "vit_b_16": Net(_vit_b_16, (128,)),
    "convnext_tiny": Net(partial(images, "convnext_tiny"), (128,)),
    "efficientnet_b0": Net(partial(images, "efficientnet_b0"), (128,)),
    "mobilenet_v3_large": Net(partial(images, "mobilenet_v3_large"), (256,)),
    "resnext50": Net(partial(images, "resnext50_32x4d"), (128,)),
    "regnet_y_1_6gf": Net(partial(images, "regnet_y_1_6gf"), (128,)),
    "densenet121": Net(partial(images, "densenet121"), (64,)),
    "swin_t": Net(partial(images, "swin_t", channels_last=False), (128,)),
    "encoder_6x256": Net(encoder, (64,)),
    "bert_base": Net(_bert, (32,)),
    "gpt2": Net(_gpt2, (16,)),
    "llama_16x1024": Net(_llama, (8,)),
    "t5_small": Net(_t5, (32,)),
    "unet2d": Net(_unet2d, (16,)),
    "nnunet3d": Net(_nnunet3d, (2,)),
    "qwen3": Net(_qwen3, (8,)),
    "qwen3_next": Net(_qwen3_next, (16,)),
    "dit_b_2": Net(_dit_b_2, (256, 64)),
    "deit3_small": Net(
        partial(timm_images, "deit3_small_patch16_224", channels_last=False), (256,)
    ),
    "convnextv2_tiny": Net(partial(timm_images, "convnextv2_tiny"), (128,)),
    "cspdarknet53": Net(partial(timm_images, "cspdarknet53"), (128,)),
    "r2plus1d_18": Net(_r2plus1d, (16,)),
    "inception_v3": Net(_inception_v3, (128,)),
    "segformer_b2": Net(_segformer, (64,)),
    "resnet50-frozen": Net(_frozen_resnet50, (16,)),
}
LAYERS = {
    "layer_norm": Net(partial(layer, nn.LayerNorm, (128,), 128), (32,)),
    "rms_norm": Net(partial(layer, nn.RMSNorm, (128,), 128), (32,)),
    "batch_norm": Net(partial(layer, nn.BatchNorm1d, (128,), 128), (32,)),
    "group_norm": Net(partial(layer, nn.GroupNorm, (8, 32), 32, 8, 8), (8,)),
    "instance_norm": Net(
        partial(layer, nn.InstanceNorm2d, (32, 1e-5, 0.1, True), 32, 8, 8), (8,)
    ),
}
