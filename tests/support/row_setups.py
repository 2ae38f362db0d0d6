"""Schedules of LayerNorm that reach every branch of its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import routes
from normplug._kernels import power_of_2
from normplug._kernels.layer_norm.schedule import Rows, WideBackward, WideForward
from row_cases import Case


class Setup(NamedTuple):
    """The shape of x, and the schedules of its forward and backward."""

    shape: tuple[int, ...]
    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any]


def as_is(shape):
    return shape


def held(r, bc, programs, **rest):
    """Tiles of r rows, in blocks of bc columns, that so many programs take in turn."""

    def change(shape):
        u = -(-power_of_2(shape.width) // bc)
        cut = {"r": r, "u": u, "bc": bc, "programs": programs, "warps": 1, "stages": 1, "k": 1}
        rest_of_it = {"keep": False, "lanes": r, "finish": 8, **rest}
        return Rows(shape.rows, shape.width, **{**cut, **rest_of_it})

    return change


def tiled(block, lag):
    """Tiles of a row, written `lag` programs after they were read."""
    return lambda shape: WideForward(shape.rows, shape.width, block, 1, lag)


def blocks(rb, cw, lag):
    """Tiles of a block of rows, written `lag` programs after they were read."""
    return lambda shape: WideBackward(shape.rows, shape.width, rb, cw, 1, lag)


SETUPS = {
    "rows": Setup((7, 24), as_is, as_is),
    "rows, uneven": Setup((9, 12), held(2, 8, 2), held(2, 8, 2)),
    "rows, side by side": Setup((7, 24), held(4, 32, 1), held(4, 32, 1, keep=True)),
    "rows, even": Setup((8, 16), held(2, 8, 2, keep=True, stages=2), held(2, 8, 2, keep=True)),
    "rows, folded": Setup((9, 16), held(1, 4, 3, keep=True), held(2, 4, 3, lanes=1, stages=3)),
    "rows, even and folded": Setup((8, 16), held(4, 16, 2), held(4, 8, 2, lanes=1, finish=16)),
    "rows, folded in part": Setup((9, 12), held(2, 8, 2), held(4, 8, 2, lanes=2, keep=True)),
    "wide": Setup((5, 40), tiled(16, 4), blocks(2, 16, 5)),
    "wide, even": Setup((4, 32), tiled(8, 4), blocks(2, 8, 4)),
    "wide, one block": Setup((3, 40), tiled(32, 5), blocks(4, 16, 3)),
    "wide, all late": Setup((3, 20), tiled(8, 9), blocks(1, 8, 9)),
    "wide, one tile": Setup((3, 20), tiled(32, 1), blocks(2, 32, 1)),
}
EVERY_SETUP = pytest.mark.parametrize("setup", SETUPS)
SOME_SETUPS = pytest.mark.parametrize("setup", ["rows, uneven", "rows, folded", "wide"])
MIXED = {"params": torch.float32, "vectors": "weight+bias+input_bias"}
VARIANTS = [
    {"dtype": torch.float16, "vectors": "bias+input_bias", "mode": "standard"},
    {"dtype": torch.bfloat16, **MIXED, "offset": 1e3, "mode": 4, "layout": "apart"},
    {"vectors": "weight+input_bias", "offset": 1e3, "running": torch.float32, "dy": "odd"},
    {"dtype": torch.float64, "vectors": "", "running": torch.float64, "momentum": None, "eps": 0.1},
    {"residual": "apart", "offset": 1e3, "vectors": "weight"},
    {"dtype": torch.bfloat16, "residual": "contiguous", "residual_dtype": torch.float32},
]


def reschedule(monkeypatch, forward, backward):
    routes.reschedule(monkeypatch, layer_norm_forward=forward, layer_norm_backward=backward)


def prepare(monkeypatch, name, **options):
    """Install the schedules of the named setup; return a `Case` of its shape."""
    setup = SETUPS[name]
    reschedule(monkeypatch, setup.forward, setup.backward)
    return Case(**{"shape": setup.shape, **options})
