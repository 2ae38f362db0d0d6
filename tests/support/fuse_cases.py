"""Blocks with all that can be fused, and what fusing them saves."""

import torch
from torch import nn

from normplug import fuse, swap, unfuse


class Block(nn.Module):
    """A residual block with all that can be fused."""

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

    def __init__(self, width=8, p=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
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


def saved_bytes(model, x):
    """What autograd keeps of a forward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    del y
    return sum(kept.values())


def check_saved_bytes(memory_format, device="cpu"):
    """With an activation the input is kept, and with a residual before it a bit a value too."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 8, 8, device=device).to(memory_format=memory_format).requires_grad_()
    vectors = 4 * 64 * 4
    lone = swap(nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()).to(device), backend="triton")
    assert saved_bytes(lone, x) >= 2 * x.nbytes
    assert saved_bytes(fuse(lone), x) <= x.nbytes + vectors
    block = Block(64).to(device, memory_format=memory_format)
    fuse(swap(block, backend="triton"))
    # Of convolutions and norms their inputs, and the signs after the addition.
    assert saved_bytes(block, x) <= 4 * x.nbytes + x.numel() // 8 + 2 * vectors
    assert saved_bytes(unfuse(block), x) >= 5 * x.nbytes


class Half(nn.Module):
    """What can be fused with its norm is in the module after it, so that the caller follows it."""

    def __init__(self, width=8, act=None):
        super().__init__()
        self.act, self.inner = act or nn.ReLU(), nn.Sequential(nn.Conv2d(width, width, 1))
        self.norm, self.scale = nn.BatchNorm2d(width), 1.0

    def forward(self, x):
        return self.norm(self.inner(self.act(x)) * self.scale)


class Nested(nn.Module):
    """Containers in containers, which the forward goes through in every way that is traced."""

    def __init__(self, width=8):
        super().__init__()
        rows = [nn.ModuleList([Half(width), Half(width)]), nn.ModuleList([Half(width)])]
        self.stages, self.extra = nn.ModuleList(rows), nn.ModuleList()
        self.tail = nn.Sequential(nn.Identity(), Half(width), Half(width))
        self.heads = nn.ModuleDict({"a": Half(width), "b": nn.Identity(), "c": Half(width)})
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
