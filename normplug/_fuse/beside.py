"""Find convolutions before fused norms whose gradients can be computed faster than by PyTorch.

`normplug._ops.convolutions` explains the two kinds.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import fx, nn

from normplug._fuse.calls import add_in_place, convolution_norm, convolve, fork
from normplug._fuse.sites import (
    FRESH,
    Forward,
    Site,
    addition,
    attribute,
    reader,
    reads_metadata,
    replace_nodes,
)
from normplug._ops import convolutions
from normplug._ops.guess import Fusion
from normplug.modules import TargetVarianceNorm


@dataclass(frozen=True)
class Beside:
    """A convolution of one of the two kinds, or one that `refusal` excludes."""

    site: Site  # of the norm, which alone reads the convolution's result
    convolution: fx.Node
    shortcut: fx.Node | None  # what else reads its input, in a residual block
    # Whether the shortcut comes first, so that the convolution has to move up.
    moves: bool
    refusal: str  # why PyTorch computes the gradients; "" if it does not

    @property
    def norm(self) -> fx.Node:
        """The norm."""
        return self.site.norm

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes."""
        shortcut = () if self.shortcut is None else (self.shortcut,)
        return self.convolution, self.norm, *shortcut

    @property
    def left(self) -> str:
        """Why a norm is not fused, as for a `Site`; empty, because these norms are fused."""
        return ""

    @property
    def note(self) -> str:
        """How the gradients are computed."""
        if self.refusal:
            way = f"PyTorch's ({self.refusal})"
        elif self.shortcut is None:
            way = "a convolution with the flipped weight"
        else:
            way = "added to the shortcut's"
        return f"gradient of {self.convolution.target}: {way}"

    @property
    def fusions(self) -> dict[str, Fusion]:
        """Path of each norm -> what it is fused with, with the note at the norm."""
        assert self.site.fusion is not None
        noted = replace(self.site.fusion, note=self.note)
        return self.site.fusions | {str(self.norm.target): noted}


def find(graph: fx.Graph, root: nn.Module, sites: Iterable[Site]) -> Iterator[Beside]:
    """Yield the convolutions of a graph, in order; sites: those of its norms."""
    traced = Forward(graph, root)
    fused = {_source(site): site for site in sites if site.fusion is not None}
    taken = set[fx.Node]()
    for node in graph.nodes:
        layer = traced.module(node)
        if node not in fused or not isinstance(layer, nn.Conv2d):
            continue
        site = fused[node]
        shortcut = None
        moves = False
        adds_bias = site.function is convolution_norm
        if not convolutions.is_depthwise(layer):
            shortcut = _shortcut(traced, node)
            if adds_bias or shortcut is None or shortcut in taken:
                continue
            moves = traced.order[shortcut] < traced.order[node]
            if moves and not _may_move(traced, node, shortcut):
                continue
        refusal = convolutions.refusal(layer, adds_bias)
        if not refusal:
            taken.add(node)
        yield Beside(site, node, shortcut, moves, refusal)


def _source(site: Site) -> fx.Node | None:
    """The node that computes a norm's input, if it takes one tensor and only the norm reads it."""
    if site.function is convolution_norm:
        return site.nodes[0]
    source = site.norm.all_input_nodes[0]
    is_alone = reader(source) is site.norm and len(source.args) == 1 and not source.kwargs
    return source if is_alone else None


def _shortcut(traced: Forward, convolution: fx.Node) -> fx.Node | None:
    """The only other reader of a convolution's input, if it does not change it."""
    x = convolution.all_input_nodes[0]
    others = [u for u in x.users if u is not convolution and not reads_metadata(u)]
    if len(others) != 1:
        return None
    other = others[0]
    adds = addition(other)
    if adds is None:
        is_harmless = getattr(type(traced.module(other)), "forward", None) in FRESH
    else:
        is_harmless = adds is not add_in_place or other.args[0] is not x
    return other if is_harmless else None


def _may_move(traced: Forward, convolution: fx.Node, shortcut: fx.Node) -> bool:
    """Whether a convolution may run before the shortcut: nothing changes its input in between.

    A view of the input may be changed, too, so only what returns a new tensor may run.
    """
    for node in (shortcut, *traced.amid(shortcut, convolution)):
        module = traced.module(node)
        is_new = getattr(type(module), "forward", None) in FRESH
        if isinstance(module, TargetVarianceNorm) or is_new or reads_metadata(node):
            continue
        if node.op != "get_attr" and addition(node) is not operator.add:
            return False
    return True


def rewrite(graph: fx.Graph, found: Iterable[Beside]) -> None:
    """Let the functions of `calls` run the convolutions; call this before `sites.rewrite`."""
    for each in found:
        if each.refusal or each.site.function is convolution_norm:
            continue
        node = each.convolution
        x = node.all_input_nodes[0]
        with graph.inserting_before(each.shortcut if each.moves else node):
            arguments = (attribute(graph, node), x)
            if each.shortcut is None:
                y = graph.call_function(convolve, arguments)
            else:
                call = graph.call_function(fork, arguments)
                y = graph.call_function(operator.getitem, (call, 0))
                skip = graph.call_function(operator.getitem, (call, 1))
                each.shortcut.replace_input_with(x, skip)
        replace_nodes(graph, y, node)
