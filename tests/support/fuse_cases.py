"""Models with every pattern that can be fused, and the results of steps."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from normplug import fuse, fusions, swap

X = torch.randn(4, 8, 5, 5, dtype=torch.double)
ROWS = torch.randn(4, 3, 8, dtype=torch.double)


class Parts(nn.Module):
    """Holds the given children and attributes, for the forward of a subclass."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def written(cls, name, **parts):
    """A module whose forward is the method `name` of a subclass of `Parts`."""
    return type("Written", (cls,), {"forward": vars(cls)[name]})(**parts)


class Block(nn.Module):
    """A residual block with every pattern that can be fused in one."""

    def __init__(self, width=8, act=None, down=None):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = act or nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.down = down
        self.scale = 1.0

    def forward(self, x):
        identity = x
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.down is not None:
            identity = self.down(x)
        y += identity * self.scale
        return self.act(y)


class PreNorm(nn.Module):
    """A transformer block: an addition before its second norm."""

    def __init__(self, width=8, p=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.mix, self.mlp = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = x + self.drop(self.mix(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Depthwise(nn.Module):
    """A convolution and the LayerNorm of its channels, as ConvNeXt's blocks begin."""

    def __init__(self, shape=(8,), bias=True):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=bias)
        self.norm = nn.LayerNorm(shape)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(PreNorm(), PreNorm())
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.blocks(x))


class Resnet(nn.Module):
    """A diffusion model's residual block: one activation module, called in several branches."""

    def __init__(self, way="add", norm=nn.GroupNorm):
        super().__init__()
        self.norm1, self.norm2 = (norm(2, 8) for _ in range(2))
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.act, self.way, self.shortcut = nn.SiLU(), way, None

    def forward(self, x, emb=None, *args, **kwargs):
        hidden = x
        hidden = self.norm1(hidden)
        hidden = self.act(hidden)
        hidden = self.conv1(hidden)
        if self.way == "add":
            if emb is not None:
                hidden = hidden + self.act(emb)
            hidden = self.norm2(hidden)
        elif self.way == "scale":
            hidden = self.norm2(hidden)
            hidden = hidden * 2
        elif self.way != "none":
            hidden = self.norm2(hidden)
        hidden = self.act(hidden)
        hidden = self.conv2(hidden)
        return x + hidden


class Half(nn.Module):
    """A norm whose activation is in the next module, so that only the caller's trace finds it."""

    def __init__(self):
        super().__init__()
        self.act, self.inner = nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 1))
        self.norm, self.scale = nn.BatchNorm2d(8), 1.0

    def forward(self, x):
        return self.norm(self.inner(self.act(x)) * self.scale)


class Nested(nn.Module):
    """Nested containers, which the forward accesses in every way that can be traced."""

    def __init__(self):
        super().__init__()
        rows = [nn.ModuleList([Half(), Half()]), nn.ModuleList([Half()])]
        self.stages, self.extra = nn.ModuleList(rows), nn.ModuleList()
        self.tail = nn.Sequential(nn.Identity(), Half(), Half())
        self.heads = nn.ModuleDict({"a": Half(), "b": nn.Identity(), "c": Half()})
        self.act, self.start = nn.ReLU(), 1

    def forward(self, x):
        for stage in self.stages:
            for half in stage:
                x = half(x)
        for half in self.tail[self.start :]:
            x = half(x)
        for module in self.extra:
            x = module(x)
        return self.act(self.heads["c"](self.heads["b"](self.heads["a"](x))))


def swapped(model, mode="golden"):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1, 0.3)
    return swap(model.double(), mode, track_running_stats=True)  # in compiled steps, too


def twins(model, mode="golden", **options):
    """A model swapped and fused, and a copy that is only swapped. options: of `fuse`."""
    plain = swapped(model, mode)
    return fuse(copy.deepcopy(plain), **options), plain


def outcome(model, *inputs, training=True, low=None):
    """The output, gradients and buffers of a step. low: a dtype of autocast."""
    # Compiled, distributed.
    bare = getattr(model, "_orig_mod", getattr(model, "module", model))
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    model.train(training).zero_grad()
    with torch.autocast(inputs[0].device.type, low, enabled=low is not None):
        y = model(*inputs)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device)
    (y * dy.view_as(y)).sum().backward()
    return {
        "y": y.detach(),
        **{f"dx{i}": x.grad for i, x in enumerate(inputs)},
        **{
            f"d{name}": p.grad
            for name, p in bare.named_parameters()
            if p.grad is not None
        },
        **{name: buffer.clone() for name, buffer in bare.named_buffers()},
    }


def assert_same_step(model, plain, *inputs, training=True):
    ours = outcome(model, *inputs, training=training)
    theirs = outcome(plain, *inputs, training=training)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_same_after(change, model, plain):
    """Assert that `change` has the same effect on the steps of both models."""
    for each in (model, plain):
        torch.manual_seed(2)
        change(each)
    assert_same_step(model, plain, X)


def skip_if_not_followed(model):
    """Skip models that torch.fx of older torch versions cannot trace."""
    if any("torch.fx cannot follow" in row.note for row in fusions(model)):
        pytest.skip("torch.fx of this version takes no sequence for torch.cat")


def torchvision_model(name, **options):
    models = pytest.importorskip("torchvision.models")
    return models.get_model(name, num_classes=3, **options)


def swin():
    transformer = pytest.importorskip(
        "torchvision.models.swin_transformer"
    ).SwinTransformer
    return transformer([2, 2], 16, [2, 2], [2, 2], [2, 2], num_classes=3)


def layer_norm_2d():
    return pytest.importorskip("torchvision.models.convnext").LayerNorm2d(8)


def convnext():
    models = pytest.importorskip("torchvision.models.convnext")
    blocks = [models.CNBlockConfig(8, 16, 2), models.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, num_classes=3)


def timm_model(name):
    return pytest.importorskip("timm").create_model(name, num_classes=3)


ZOO = {  # name -> (how to build the model, how many of its norms are fused)
    "resnet18": (partial(torchvision_model, "resnet18"), 17),
    "regnet": (partial(torchvision_model, "regnet_y_400mf"), 49),
    "resnet26t of timm": (partial(timm_model, "resnet26t"), 27),
    "mobilenet_v2": (partial(torchvision_model, "mobilenet_v2"), 45),
    "mobilenet_v3": (partial(torchvision_model, "mobilenet_v3_small"), 29),
    "densenet121": (partial(torchvision_model, "densenet121"), 121),
    "shufflenet": (partial(torchvision_model, "shufflenet_v2_x0_5"), 37),
    "efficientnet": (partial(torchvision_model, "efficientnet_b0"), 33),
    "vit": (
        lambda: pytest.importorskip("torchvision.models").VisionTransformer(
            32, 8, 3, 2, 16, 32, dropout=0.1, num_classes=3
        ),
        6,
    ),
    "swin": (swin, 8),
    "convnext": (convnext, 3),
    "block": (Block, 2),
    "convolutions and batch norms in sequence": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.BatchNorm2d(8),
        ),
        2,
    ),
}  # fmt: skip


def renamed(container, **names):
    children = {names.get(name, name): m for name, m in container._modules.items()}
    container._modules.clear()
    container._modules.update(children)
