"""Set up the launches of LayerNorm and RMSNorm from a geometry, strides and a call's flags."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from normplug._kernels import needs_int64, power_of_2, unit_of
from normplug._kernels.launch import TYPES, Launch, accumulator
from normplug._kernels.layer_norm import rows, wide_rows
from normplug._kernels.layer_norm.schedule import Rows, Wide
from normplug._layouts import Levels, Spacing

_FAN_IN = 64  # parts of the running statistics that a program adds at a time, for each warp


@dataclass(frozen=True)
class Flags:
    """What a call has and asks for, besides its shape and dtypes.

    centred, offset, running, tracked, cumulative: the kernels' constants of these names. rounded:
    the dtype to round to before the product with the weight, if any. given: the rows' statistics
    are passed in. stats: they are saved.
    """

    centred: bool = True
    offset: float = 0.0
    rounded: torch.dtype | None = None
    weight: bool = True
    bias: bool = True
    input_bias: bool = False
    residual: bool = False
    given: bool = False
    stats: bool = True
    running: bool = False
    tracked: bool = False
    cumulative: bool = False


class Strides(NamedTuple):
    """The spacing of each tensor's rows; None for a tensor that a call does not have.

    All `inner` are the same, and so are all `heads` of rows with three levels.
    """

    x: Spacing
    residual: Spacing | None = None
    dy: Spacing | None = None
    dtotal: Spacing | None = None

    def unit(self, width: int) -> int:
        """A divisor of the width and all strides: the alignment the compiler may assume."""
        sizes = ((s.outer, s.step, s.middle) if isinstance(s, Levels) else (s or 0,) for s in self)
        return unit_of(width, *itertools.chain(*sizes))

    @property
    def levels(self) -> Levels | None:
        """The `Levels` of the tensor with the most levels; None if there are none."""
        every = (s for s in self if isinstance(s, Levels))
        return max(every, key=lambda levels: levels.heads, default=None)


def forward_launch(
    shape: Rows | Wide,
    dtype: torch.dtype,
    flags: Flags,
    strides: Strides,
    momentum: float,
    eps: float,
    tv: float,
) -> Launch:
    """Set up the forward kernel of a geometry."""
    # The wide kernel would wait forever: with given statistics, no program stores the total.
    assert not (flags.given and flags.residual)
    finishers = _finishers(shape) if flags.running else 0
    given: dict[str, Any] = {
        **_sizes(shape, strides, X=strides.x, RESIDUAL=strides.residual),
        **_formula(dtype, flags, tv),
        "FINISHERS": finishers,
        "momentum": momentum,
        "eps": eps,
        "FAN_IN": _FAN_IN * shape.warps,
        "TRACKED": flags.running and flags.tracked,
    }
    if isinstance(shape, Wide):
        lag = 0 if flags.given else shape.lag
        grid = shape.rows * shape.k + lag + finishers
        given |= {"LAG": lag, "KP": min(power_of_2(shape.k), 1024)}
        return Launch(wide_rows.layer_norm_wide_forward, grid, shape.warps, shape, flags, **given)
    grid = shape.programs + finishers
    return Launch(rows.layer_norm_rows_forward, grid, shape.warps, shape, flags, **given)


def backward_launch(
    shape: Rows | Wide,
    dtype: torch.dtype,
    flags: Flags,
    strides: Strides,
    needs: tuple[bool, bool, bool, bool],
    tv: float,
) -> Launch:
    """Set up the backward kernel; `needs`: which of dx, dweight, dbias, dinput_bias are wanted."""
    x = strides.x
    sums = sum(needs[1:])
    given: dict[str, Any] = {
        **_sizes(shape, strides, X=x, DY=strides.dy, DTOTAL=strides.dtotal),
        **_formula(dtype, flags, tv),
        "DTOTAL": strides.dtotal is not None,
        **dict(zip(("DX", "DWEIGHT", "DBIAS", "DINPUT_BIAS"), needs, strict=True)),
        "DX_AS_X": isinstance(x, Levels) and x.dense(shape.rows, shape.width),
    }
    if isinstance(shape, Wide):
        lag = shape.lag if given["DX"] or given["DINPUT_BIAS"] else 0
        finishers = shape.k if sums and shape.blocks > 1 else 0
        grid = shape.blocks * shape.k + lag + finishers
        at_once = min(power_of_2(shape.k), max(4096 // (2 * shape.rb), 1))
        given |= {"LAG": lag, "KP": at_once, "SINGLE": shape.blocks == 1}
        return Launch(wide_rows.layer_norm_wide_backward, grid, shape.warps, shape, flags, **given)
    finishers = -(-shape.width // shape.finish) if sums and shape.k == 1 else 0
    given |= {"K_PADDED": power_of_2(shape.k), "cooperative": shape.k > 1}
    grid = shape.programs + finishers
    return Launch(rows.layer_norm_rows_backward, grid, shape.warps, shape, flags, **given)


def _formula(dtype: torch.dtype, flags: Flags, tv: float) -> dict[str, Any]:
    """The arguments that select the formula and its dtypes."""
    acc = accumulator(dtype)
    rounded = acc if flags.rounded is None else tl.dtype(TYPES[flags.rounded])
    return {"ACC": acc, "ROUND": rounded, "root": math.sqrt(tv)}


def _sizes(shape: Rows | Wide, strides: Strides, **spacings: Spacing | None) -> dict[str, Any]:
    """The arguments that say where rows are; `spacings` are by tensor name."""
    count, width = shape.rows, shape.width
    unit, levels = strides.unit(width), strides.levels
    inner = count if levels is None else levels.inner
    given: dict[str, Any] = {
        "INNER": inner,
        "WIDTH_UNITS": width // unit,
        "UNIT": unit,
        "HEADS": 0 if levels is None else levels.heads,
    }
    furthest = count * width
    for name, spacing in spacings.items():
        if isinstance(spacing, Levels):
            _, outer, step, heads, middle = spacing
        else:
            step = width if spacing is None else spacing
            outer, heads, middle = inner * step, 1, 0
        given |= {f"{name}_UNITS": step // unit, f"{name}_OUTER_UNITS": outer // unit}
        given[f"{name}_MIDDLE"] = middle
        furthest = max(furthest, count // inner // heads * outer + heads * middle + inner * step)
    given["WIDE"] = needs_int64(1, furthest)
    return given


def forward_scratch(shape: Rows | Wide, flags: Flags) -> tuple[int, int]:
    """How many counters and partial results a forward launch needs."""
    words = 2 * (shape.parts + _finishers(shape)) if flags.running else 0
    if isinstance(shape, Wide):
        return shape.rows + words, 2 * shape.rows * shape.k
    return words, 0


def _finishers(shape: Rows | Wide) -> int:
    """Programs that add up the parts: at most about the square root of the number of parts."""
    parts, at_a_time = shape.parts, _FAN_IN * shape.warps
    times = -(-math.isqrt(parts) // at_a_time)
    return -(-parts // (times * at_a_time))


def backward_scratch(shape: Rows | Wide, needs: tuple[bool, bool, bool, bool]) -> tuple[int, int]:
    """How many counters and partial results a backward launch needs."""
    sums = sum(needs[1:])
    if isinstance(shape, Wide):
        rows_room = shape.blocks * (shape.k + 1) * 2 * shape.rb
        parts = 0 if shape.blocks == 1 else shape.blocks * sums * shape.width
        return 2 * shape.blocks + shape.k, rows_room + parts
    met = shape.tiles if shape.k > 1 else 0
    return 1 + met, 2 * met * shape.k * shape.r + shape.groups * sums * shape.width
