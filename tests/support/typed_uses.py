"""Uses of normplug for `tests/test_typing.py`, which has mypy and pyright read this file.

A line with the comment `# wrong` is an error to them, and no other line is. Nothing runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import normplug
from normplug import functional
from normplug.lightning import SwapNorms


class Net(nn.Module):
    """A model whose method a type checker knows after each call."""

    def encode(self, x: Tensor) -> Tensor:
        """A method of its own."""
        return x


net = Net()
assert_type(normplug.swap(net), Net)
assert_type(normplug.unswap(net), Net)
assert_type(normplug.set_mode(net, 0.5), Net)
assert_type(normplug.fuse(normplug.swap(net)), Net)
assert_type(normplug.unfuse(net), Net)
assert_type(normplug.freeze(net), Net)
assert_type(normplug.thaw(net), Net)
assert_type(normplug.sync_buffers(net), Net)
with normplug.swapped(net, "golden", backend="torch") as inside:
    assert_type(inside, Net)
normplug.swap(net).encode(torch.ones(2))
normplug.swap(net).decode(torch.ones(2))  # wrong
normplug.swap("resnet18")  # wrong

normplug.swap(net, "golden")
normplug.swap(net, 0.5)
normplug.swap(net, 2)
normplug.swap(net, normplug.NormMode.STANDARD)
normplug.swap(net, {"layer1.*": "golden", nn.LayerNorm: 0.5})
normplug.swap(net, lambda path, layer: "golden" if "head" in path else 1.0)
normplug.swap(net, normplug.by_depth("1/l"))
normplug.swap(net, normplug.by_depth(lambda block, blocks: block / blocks))
normplug.swap(net, "gold")  # wrong
normplug.swap(net, {"layer1.*": "gold"})  # wrong
normplug.swap(net, normplug.by_depth("1/n"))  # wrong
normplug.set_mode(net, "Golden")  # wrong
normplug.plan(net, "silver")  # wrong
normplug.target_variance("gold")  # wrong
normplug.LayerNorm(8, mode="gold")  # wrong

normplug.swap(net, backend="triton", statistics="safe", autocast_output="float32")
normplug.swap(net, backend="cuda")  # wrong
normplug.swap(net, statistics="save")  # wrong
normplug.swap(net, autocast_output="bfloat16")  # wrong
normplug.BatchNorm2d(8, backend="gpu")  # wrong
functional.layer_norm(torch.ones(2, 8), (8,), backend="gpu")  # wrong
SwapNorms("golden", fuse=True, backend="triton")
SwapNorms("gold")  # wrong
SwapNorms(backend="gpu")  # wrong
with normplug.swapped(net, backend="gpu"):  # wrong
    pass
