"""BatchNorm, relu and max pooling by normplug's own kernels, for channels_last.

A call is two launches forward (statistics, then the rest) and two backward (sums by channel, then
dx). In eval mode the forward is a single launch. If values tie after rounding, the gradient
goes to the one that was largest before rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normplug._kernels.batch_norm import launches, schedule, windows
from normplug._kernels.launch import Launch
from normplug._layouts import is_channels_last
from normplug._ops import eligible
from normplug._ops.batch_norm_plan import BatchNormPlan
from normplug._ops.plans import RUNNING, Layout, Needs, Program, named, strides_of
from normplug._ops.spec import Pool, Tensors


def refusal(t: Tensors, pool: Pool) -> str | None:
    """Why the kernels cannot pool the result of a norm of x; None if they can."""
    x = t.x
    if x.dim() != 4 or x.is_contiguous() or not is_channels_last(x.shape, x.stride()):
        return "the input is not channels_last"
    n, c, height, width = x.shape
    largest = max(math.prod(pool.kernel), math.prod(pool.stride))
    if not pool.is_proper() or largest > windows.LARGEST_WINDOW:
        return "max-pool windows and strides must span 1 to 25 elements, with valid padding"
    pooled = pool.size(height, width)
    if min(pooled) < 1:
        return "the output is empty"
    if eligible.is_too_long(n * math.prod(pooled), width * c, pooled[1] * c):
        return "a row of pixels has nearly 2^31 values or more, or the output as many pixels"
    return None


class PooledPlan(BatchNormPlan):
    """The launches of a BatchNorm with relu and max pooling. State: stats, peaks and places.

    stats: mean and rstd of the channels, (2 * C,). peaks: the largest input of each window, and
    places: where in the window it lies, shaped like the output.
    """

    state = ("stats", "peaks", "places")

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x, pool = t.x, spec.pool
        assert pool is not None
        self._dtype = x.dtype
        self._n, _, height, width = x.shape
        self._size = (height, width)
        self._pooled = pool.size(height, width)
        self._output_shape = (self._n, self._channels, *self._pooled)
        self._output_stride = strides_of(self._output_shape, torch.channels_last)
        self._window = (pool.kernel, pool.stride, pool.padding)
        self._joined = spec.peers is not None

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        spec, flags, (height, width) = self.spec, self._flags, self._pooled
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if spec.training:
            geometry = schedule.geometry(*self._shape, 1, *self._machine)
            alone = replace(flags, weight=False, bias=False, activation=None, normalize=False)
            numbers = (spec.momentum or 0.0, spec.eps, spec.target_variance)
            launch = launches.forward_launch(geometry, self._dtype, alone, *numbers)
            steps.append((launch, {"weight": "partial", "bias": "partial", "y": "x"}))
            scratch = launches.scratch(geometry)
        forward = self._launch(
            windows.batch_norm_pool_forward, self._n * height, width, eps=spec.eps,
            TRAINING=spec.training, WEIGHT=flags.weight, BIAS=flags.bias, KEEP=keep,
        )  # fmt: skip
        steps.append((forward, {}))
        output = (self._output_shape, self._output_stride)
        size = 2 * self._channels + self._joined
        empties = {"stats": ((size,), (1,), self.acc), "y": (*output, self._dtype)}
        if keep:
            empties |= {"peaks": (*output, self._dtype), "places": (*output, torch.uint8)}
        return Program(
            named(t),
            *steps,
            empties=empties,
            saved=("x", "nothing", "weight", "bias", "nothing", *self.state),
            updates=RUNNING if spec.training else (),
            counts=flags.cumulative,
            scratch=scratch,
        )

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        """The program: the sums by channel, in the dtype of stats, and then dx."""
        training, tv = self.spec.training, self.spec.target_variance
        is_laid_out = given["dy"].is_contiguous(memory_format=torch.channels_last)
        through = needs[0] and training
        summed = (needs[2] or through, needs[3] or through)
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if any(summed):
            shape = (self._n, self._channels, math.prod(self._pooled), True, self._dtype.itemsize)
            geometry = schedule.geometry(*shape, 2, *self._machine)
            scratch = launches.scratch(geometry)
            flags = replace(self._flags, share=self._joined and through)
            wanted = (False, *summed, False)
            launch = launches.backward_launch(geometry, self._dtype, flags, wanted, tv)
            steps.append((launch, {"x": "peaks", "dx": "message"}))
        if needs[0]:
            sh, sw = self._window[1]  # the schedule's pixels are blocks of sh * sw inputs
            rows, columns = self._n * -(-self._size[0] // sh), -(-self._size[1] // sw)
            launch = self._launch(
                windows.batch_norm_pool_backward, rows, columns, TRAINING=training,
                JOINED=self._joined, WEIGHT=self._flags.weight,
            )  # fmt: skip
            sums = {"dweight": "message"} if self._joined and training else {}
            steps.append((launch, sums))
        x, channels = given["x"], ((self._channels,), (1,), self.acc)
        empties: dict[str, Layout] = {
            f"d{n}": channels for n, s in zip(("weight", "bias"), summed, strict=True) if s
        }
        if needs[0]:
            empties["dx"] = (x.shape, x.stride(), x.dtype)
        if self._joined and through:
            empties["message"] = ((2 * self._channels,), (1,), self.acc)
        vectors = [  # summed for dx, too
            (f"d{name}", given[name].dtype) if need else "nothing"
            for name, need in (("weight", needs[2]), ("bias", needs[3]))
        ]
        return Program(
            given,
            *steps,
            empties=empties,
            results=("dx", "nothing", *vectors, "nothing"),
            copies={} if is_laid_out else {"dy": self._output_stride},
            scratch=scratch,
        )

    def _launch(self, kernel: Any, rows: int, width: int, **given: Any) -> Launch:
        """The launch of a kernel of `windows` over `rows` rows of `width` pixels."""
        pixels = schedule.pixels(rows, width, self._channels, self._dtype.itemsize)
        sizes = (self._window, self._size, self._pooled, self.spec.target_variance)
        return launches.pool_launch(kernel, pixels, self._dtype, *sizes, **given)
