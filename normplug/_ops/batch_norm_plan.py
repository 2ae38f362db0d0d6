"""The plans of a BatchNorm: of the norm, of the norm with max pooling, and of statistics.

With relu and max pooling, a call is two launches forward (statistics, then the rest) and two
backward (sums by channel, then dx). In eval mode the forward is a single launch. If values tie
after rounding, the gradient goes to the one that was largest before rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from normplug._activations import backward_reads_input
from normplug._kernels import processors
from normplug._kernels.batch_norm import launches, schedule, windows
from normplug._kernels.launch import COOPERATIVE, Launch
from normplug._layouts import is_channels_last, lies_like
from normplug._ops import eligible, peers, stock
from normplug._ops.plans import RUNNING, Needs, Plan, Program, gradients_of, named, strides_of
from normplug._ops.spec import Pool, Tensors
from normplug.reference import accumulator_dtype


class BatchNormPlan(Plan):
    """The launches of a BatchNorm, with residual and activation: one per direction.

    State: stats, mean and rstd of the channels, (2 * C,); and bits, relu's mask, saved if there is
    a residual.
    """

    spec: Any  # a `batch_norm.BatchNormSpec`, which imports this module
    state: ClassVar[tuple[str, ...]] = ("stats", "bits")

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x, self.peers = t.x, peers.peers_of(spec.join)
        self.acc = accumulator_dtype(x.dtype)
        n, self._channels, *space = x.shape
        self._dtype, self._numbers = x.dtype, (spec.eps, spec.target_variance)
        # What the schedule takes: sizes, whether x is channels_last, and the bytes of a value.
        sizes = (n, self._channels, math.prod(space))
        self._shape = (*sizes, not x.is_contiguous(), x.element_size())
        updates = spec.training and t.running_mean is not None
        self._flags = launches.Flags(
            training=spec.training,
            **t.has("weight", "bias", "residual"),
            activation=spec.activation,
            running=t.running_mean is not None,
            cumulative=updates and spec.momentum is None,
            tracked=updates and t.tracked is not None and spec.momentum is not None,
            safe=spec.safe and updates,
            constant=spec.constant and spec.pool is None,
            **({"world": self.peers.world, "peers": self.peers.table} if self.peers else {}),
        )
        self._reads_residual = self._flags.residual and backward_reads_input(spec.activation)
        self._keeps_residual = self._reads_residual or spec.keeps_residual
        # Of constants, dx needs no x, if relu's mask replaces it.
        self._keeps_x = not (self._flags.constant and spec.activation in (None, "relu"))
        self._layout = x.shape, x.stride(), x.dtype
        self.is_recomputable = self._keeps_residual or not self._flags.residual
        self.is_recomputable &= x.numel() > 0 and spec.pool is None and self._keeps_x
        self._machine = machine_of(x, self.peers is None)

    def _forward(self, flags: launches.Flags) -> tuple[Launch, tuple[int, int]]:
        """The launch of a forward, or of a part of it, and its scratch memory."""
        geometry = schedule.geometry(*self._shape, 1, *self._machine)
        numbers = (0.0 if flags.given else self.spec.momentum or 0.0, *self._numbers)
        launch = launches.forward_launch(geometry, self._dtype, flags, *numbers)
        return launch, launches.scratch(geometry)

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        x, spec = t.x, self.spec
        launch, scratch = self._forward(self._flags)
        empties = {
            "y": (x.shape, x.stride(), x.dtype),
            "stats": ((2 * self._channels + (self.peers is not None),), (1,), self.acc),
        }
        if self._flags.bits:
            mask_bytes = schedule.mask_bytes(*self._shape)
            empties["bits"] = ((mask_bytes,), (1,), torch.uint8)
        kept = "residual" if self._keeps_residual else "nothing"
        saved = (kept, "weight", "bias", "nothing", "stats", "bits")
        return Program(
            named(t),
            (launch, {}),
            empties=empties,
            saved=("x" if self._keeps_x else "nothing", *saved),
            updates=RUNNING if spec.training else (),
            counts=self._flags.cumulative,
            scratch=scratch,
        )

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        x = saved["x"]  # normalised by the saved statistics
        flags = replace(
            self._flags, training=False, given=True, running=False, cumulative=False, tracked=False,
            world=1, peers=0,
        )  # fmt: skip
        launch, _ = self._forward(flags)
        return Program(saved, (launch, {}), empties={"y": (x.shape, x.stride(), x.dtype)})

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        x, dy, plain = self._stand_in("meta"), given["dy"], self.spec.activation is None
        copies = {} if lies_like(dy, x) else {"dy": x.stride()}
        # Without an activation, dy is the residual's gradient.
        through = needs[1] and not plain
        wanted = (needs[0], needs[2], needs[3], through)
        empties = gradients_of({**given, "x": x}, wanted[:3])
        if through:
            empties["dresidual"] = (x.shape, x.stride(), x.dtype)
        for_residual = "dy" if plain and needs[1] else "dresidual"
        results = ("dx", for_residual, "dweight", "dbias", "nothing")
        if not any(wanted):
            return Program(given, copies=copies, empties={}, results=results)
        geometry = schedule.geometry(*self._shape, 2, *self._machine)
        tv = self.spec.target_variance
        launch = launches.backward_launch(geometry, self._dtype, self._flags, wanted, tv)
        return Program(
            given,
            (launch, {}),
            copies=copies,
            empties=empties,
            results=results,
            scratch=launches.scratch(geometry),
        )

    def _stand_in(self, device: Any) -> Tensor:
        """A tensor with the layout of x."""
        shape, stride, dtype = self._layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Tensors, Any, Tensor]:
        x, residual, weight, bias, _, stats, *_ = saved
        spec, mean, var = self.spec, None, None
        if x is None:  # the gradients do not depend on its values
            x = self._stand_in(self.device).zero_().requires_grad_()
        if spec.join:
            raise NotImplementedError(peers.NO_SECOND_DERIVATIVE)
        if self._flags.bits:
            # relu's mask as ones and zeros: the residual's gradient for a dy of ones.
            needs = (False, True, False, False, False)
            detached = (x.detach(), *saved[1:])
            _, mask, *_ = self.backward(detached, torch.ones_like(x), None, needs)
            assert mask is not None
            dy, spec = dy * mask, spec._replace(activation=None)
        if self._flags.residual and not self._reads_residual:
            # The gradients do not depend on its values.
            residual = torch.zeros_like(x).requires_grad_()
        if not spec.training:
            mean, rstd = stats.chunk(2)
            var = stock.variance_of(rstd, spec.eps)
        return Tensors(x, residual, weight, bias, None, mean, var), spec, dy


def machine_of(x: Tensor, alone: bool = True) -> tuple[int, bool]:
    """The number of multiprocessors, and whether cooperative launches may be used.

    alone: whether the call exchanges nothing with other processes. A cooperative launch needs all
        multiprocessors at once. While it waited for a peer, NCCL's kernels could not start on this
        GPU, and NCCL's kernels on the peer's GPU would keep its launch from starting.
    """
    return processors(x.device), COOPERATIVE and x.is_cuda and alone


class StatisticsPlan(BatchNormPlan):
    """The launch of `channel_stats` for a dense x; y: the channels' means, then their variances."""

    state = ()

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        launch, scratch = self._forward(replace(self._flags, normalize=False, variance=True))
        empties = {"y": ((2 * self._channels,), (1,), self.acc)}
        renamed = {"stats": "y", "y": "x"}
        return Program(named(t), (launch, renamed), empties=empties, scratch=scratch)

    def _expect_next(self, *_: Any) -> None:
        """Nothing: a model's layers need not be called next."""


class MergePlan(StatisticsPlan):
    """The launch that merges the processes' statistics; y: mean, var and n of the joined batch."""

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        (processes, width), numbers = t.x.shape, (self.spec.momentum or 0.0, self.spec.eps)
        flags = self._flags
        launch = launches.merge_launch(processes, width // 2, self._dtype, flags, *numbers)
        empties = {"y": ((width,), (1,), self.acc)}
        step, counts = (launch, {"stats": "y"}), flags.cumulative
        return Program(named(t), step, empties=empties, updates=RUNNING, counts=counts)


def refusal_to_pool(t: Tensors, pool: Pool) -> str | None:
    """Why the kernels cannot pool the result of a norm of x; None if they can."""
    x = t.x
    if x.dim() != 4 or x.is_contiguous() or not is_channels_last(x.shape, x.stride()):
        return "the input is not channels_last"
    if max(math.prod(pool.kernel), math.prod(pool.stride)) > windows.LARGEST_WINDOW:
        return "max-pool windows and strides must span at most 25 elements"
    pooled, (n, c, _, width) = pool.size(x), x.shape
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
        pool: Pool = spec.pool
        self._n, _, height, width = t.x.shape
        self._size, self._pooled = (height, width), pool.size(t.x)
        shape = (self._n, self._channels, *self._pooled)
        self._output = (shape, strides_of(shape, torch.channels_last))
        self._window = (pool.kernel, pool.stride, pool.padding)
        self._joined = self.peers is not None

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        spec, flags, (height, width) = self.spec, self._flags, self._pooled
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if spec.training:
            alone = replace(flags, weight=False, bias=False, activation=None, normalize=False)
            launch, scratch = self._forward(alone)
            steps.append((launch, {"weight": "partial", "bias": "partial", "y": "x"}))
        forward = self._launch(
            windows.batch_norm_pool_forward, self._n * height, width, eps=spec.eps,
            TRAINING=spec.training, WEIGHT=flags.weight, BIAS=flags.bias, KEEP=keep,
        )  # fmt: skip
        steps.append((forward, {}))
        size = 2 * self._channels + self._joined
        empties = {"stats": ((size,), (1,), self.acc), "y": (*self._output, self._dtype)}
        if keep:
            empties["peaks"] = (*self._output, self._dtype)
            empties["places"] = (*self._output, torch.uint8)
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
        channels = ((self._channels,), (1,), self.acc)
        empties = gradients_of(given, needs[:1])
        empties |= {f"d{n}": channels for n, s in zip(("weight", "bias"), summed, strict=True) if s}
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
            copies={} if is_laid_out else {"dy": self._output[1]},
            scratch=scratch,
        )

    def _launch(self, kernel: Any, rows: int, width: int, **given: Any) -> Launch:
        """The launch of a kernel of `windows` over `rows` rows of `width` pixels."""
        pixels = schedule.pixels(rows, width, self._channels, self._dtype.itemsize)
        sizes = (self._window, self._size, self._pooled, self.spec.target_variance)
        return launches.pool_launch(kernel, pixels, self._dtype, *sizes, **given)
