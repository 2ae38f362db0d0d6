"""BatchNorm, relu and max pooling by normplug's own kernels, for channels_last.

A call is two launches forward (statistics, then the rest) and two backward (sums by channel, then
dx). In eval mode the forward is a single launch. If values tie after rounding, the gradient
goes to the one that was largest before rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normplug._kernels.batch_norm import launches, schedule, windows
from normplug._kernels.launch import Launch
from normplug._layouts import is_channels_last
from normplug._ops import eligible, peers
from normplug._ops.batch_norm import (
    BatchNormSpec,
    constants_of,
    group_of,
    machine_of,
)
from normplug._ops.plans import RUNNING, Layout, Needs, Plan, Program, named
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


class PooledPlan(Plan):
    """The launches of a BatchNorm with relu and max pooling. State: stats, peaks and places.

    stats: mean and rstd of the channels, (2 * C,). peaks: the largest input of each window, and
    places: where in the window it lies, shaped like the output.
    """

    spec: BatchNormSpec
    state = ("stats", "peaks", "places")

    def __init__(self, t: Tensors, spec: BatchNormSpec) -> None:
        super().__init__(t, spec)
        x, pool = t.x, spec.pool
        assert pool is not None
        self._dtype = x.dtype
        self._n, self._channels, height, width = x.shape
        self._size = (height, width)
        self._pooled = pool.size(height, width)
        self._output_shape = (self._n, self._channels, *self._pooled)
        self._window = (pool.kernel, pool.stride, pool.padding)
        self._machine = machine_of(x, spec.peers is None)
        self._weight, self._bias = t.weight is not None, t.bias is not None
        self._running_dtype = None if t.running_mean is None else t.running_mean.dtype
        self._joined = spec.peers is not None
        self.mark = spec.peers.mark if self._joined else 0
        self._cumulative = spec.training and spec.momentum is None and t.running_mean is not None

    def _columns(self, size: tuple[int, int], tensors: int) -> schedule.Geometry:
        shape = (self._n, self._channels, math.prod(size), True, self._dtype.itemsize)
        return schedule.geometry(*shape, tensors, *self._machine)

    def _statistics(self, t: Tensors) -> tuple[Launch, tuple[int, int]]:
        """The launch for mean and rstd, and the scratch memory that it needs."""
        spec, running = self.spec, t.running_mean is not None
        geometry = self._columns(self._size, 1)
        flags = launches.Flags(
            weight=False,
            bias=False,
            running=running,
            cumulative=self._cumulative,
            tracked=running and t.tracked is not None and spec.momentum is not None,
            normalize=False,
            **group_of(spec),
        )
        launch = launches.forward_launch(
            geometry, self._dtype, flags, spec.momentum or 0.0, spec.eps, spec.target_variance
        )
        return launch, launches.scratch(geometry)

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        spec, (height, width) = self.spec, self._pooled
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if spec.training:
            launch, scratch = self._statistics(t)
            steps.append((launch, {"weight": "partial", "bias": "partial", "y": "x"}))
        forward = self._launch(
            windows.batch_norm_pool_forward, self._n * height, width, eps=spec.eps,
            TRAINING=spec.training, WEIGHT=self._weight, BIAS=self._bias, KEEP=keep,
        )  # fmt: skip
        steps.append((forward, {}))
        output = (self._output_shape, _channels_last(self._output_shape))
        size = 2 * self._channels + self._joined
        empties = {"stats": ((size,), (1,), self.acc), "y": (*output, self._dtype)}
        if keep:
            empties |= {"peaks": (*output, self._dtype), "places": (*output, torch.uint8)}
        return Program(
            named(t),
            empties=empties,
            launches=steps,
            saved=("x", "nothing", "weight", "bias", "nothing", *self.state),
            updates=RUNNING if spec.training else (),
            counts=self._cumulative,
            scratch=scratch,
        )

    def backward_program(
        self, saved: dict[str, Tensor], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program: the sums by channel, in the dtype of stats, and then dx."""
        training, tv = self.spec.training, self.spec.target_variance
        assert dy is not None
        is_laid_out = dy.is_contiguous(memory_format=torch.channels_last)
        through = needs[0] and training
        summed = (needs[2] or through, needs[3] or through)
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if any(summed):
            geometry = self._columns(self._pooled, 2)
            scratch = launches.scratch(geometry)
            flags = launches.Flags(
                training=training,
                weight=self._weight,
                bias=self._bias,
                activation="relu",
                share=self._joined and through,
                **group_of(self.spec),
            )
            wanted = (False, *summed, False)
            launch = launches.backward_launch(geometry, self._dtype, flags, wanted, tv)
            steps.append((launch, {"x": "peaks", "dx": "message"}))
        if needs[0]:
            sh, sw = self._window[1]  # the schedule's pixels are blocks of sh * sw inputs
            rows, columns = self._n * -(-self._size[0] // sh), -(-self._size[1] // sw)
            launch = self._launch(
                windows.batch_norm_pool_backward, rows, columns, TRAINING=training,
                JOINED=self._joined, WEIGHT=self._weight,
            )  # fmt: skip
            sums = {"dweight": "message"} if self._joined and training else {}
            steps.append((launch, sums))
        x, channels = saved["x"], ((self._channels,), (1,), self.acc)
        empties: dict[str, Layout] = {
            f"d{n}": channels for n, s in zip(("weight", "bias"), summed, strict=True) if s
        }
        if needs[0]:
            empties["dx"] = (x.shape, x.stride(), x.dtype)
        if self._joined and through:
            empties["message"] = ((2 * self._channels,), (1,), self.acc)
        return Program(
            {**saved, "dy": dy},
            empties=empties,
            launches=steps,
            results=[
                "dx" if needs[0] else "nothing",
                "nothing",
                self._gradient_of("weight", saved, needs[2]),
                self._gradient_of("bias", saved, needs[3]),
                "nothing",
            ],
            copies={} if is_laid_out else {"dy": _channels_last(self._output_shape)},
            scratch=scratch,
        )

    def _launch(self, kernel: Any, rows: int, width: int, **given: Any) -> Launch:
        """The launch of a kernel of `windows` over `rows` rows of `width` pixels."""
        pixels = schedule.pixels(rows, width, self._channels, self._dtype.itemsize)
        sizes = (self._window, self._size, self._pooled, self.spec.target_variance)
        return launches.pool_launch(kernel, pixels, self._dtype, *sizes, **given)

    def _gradient_of(
        self, name: str, saved: dict[str, Tensor], needed: bool
    ) -> str | tuple[str, torch.dtype | None]:
        if not needed or name not in saved:
            return "nothing"
        dtype = saved[name].dtype
        return f"d{name}", None if dtype == self.acc else dtype

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        x, _, weight, bias, _, stats, *_ = saved
        if self._joined:
            raise NotImplementedError(peers.NO_SECOND_DERIVATIVE)
        mean, var = constants_of(stats, self.spec, self._running_dtype)
        t = Tensors(x, None, weight, bias, None, mean, var)
        y = self.spec._replace(momentum=0.0, peers=None).by_torch(t)
        return (x, None, weight, bias, None), y, dy


def _channels_last(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The strides of a channels_last tensor."""
    _, c, height, width = shape
    return (height * width * c, 1, width * c, c)
