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

from normplug._activations import backward_reads_input, kernel_code
from normplug._kernels import processors
from normplug._kernels.ahead import Job
from normplug._kernels.batch_norm import columns, planes, schedule, windows
from normplug._kernels.batch_norm.schedule import Geometry, Planes, Window
from normplug._kernels.constants import Constants
from normplug._kernels.launch import COOPERATIVE, Launch, accumulator
from normplug._layouts import lies_like
from normplug._ops import exchange, torch_way
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.plans import (
    RUNNING,
    Layout,
    Needs,
    Plan,
    Program,
    gradients_of,
    named,
    strides_of,
)
from normplug._ops.spec import Pool, Tensors
from normplug.reference import accumulator_dtype


class BatchNormPlan(Plan):
    """The launches of a BatchNorm, with residual and activation: one per direction.

    State: stats, mean and rstd of the channels, (2 * C,); and bits, relu's mask, saved if there is
    a residual. If the residual has a norm, `input_bias` is the result of its `ResidualPlan`, where
    the forward stores mean and rstd, too; there are no other stats.
    """

    spec: BatchNormSpec
    state: ClassVar[tuple[str, ...]] = ("stats", "bits")

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x = t.x
        self.peers = exchange.peers_of(spec.join)
        self.acc = accumulator_dtype(x.dtype)
        n, self._channels, *space = x.shape
        self._dtype = x.dtype
        # What the schedule takes: sizes, whether x is channels_last, and the bytes of a value.
        sizes = (n, self._channels, math.prod(space))
        self._shape = (*sizes, not x.is_contiguous(), x.element_size())
        updates = spec.training and t.running_mean is not None
        # The host counts the batch before the launch, whatever the batch holds.
        self._counts = updates and spec.momentum is None
        assert not (self._counts and spec.safe)
        self._constant = spec.constant and spec.pool is None
        self._has_residual = has_residual = t.residual is not None
        self._residual_norm = t.input_bias is not None
        self._renamed = {"stats": "input_bias"} if self._residual_norm else {}
        self._world = self.peers.world if self.peers else 1
        # What both directions share; `_forward` and `_backward` have the rest.
        self._constants = Constants(
            acc=accumulator(x.dtype),
            weight=t.weight is not None,
            bias=t.bias is not None,
            bits=spec.activation == "relu" and (has_residual or self._constant),
            activation=kernel_code(spec.activation),
        )
        self._updates: dict[str, Any] = {
            "running": updates,
            "cumulative": self._counts,
            "tracked": updates and t.tracked is not None and not self._counts,
        }
        self._root = math.sqrt(spec.target_variance)
        reads = self._residual_norm or backward_reads_input(spec.activation)
        self._reads_residual = has_residual and reads
        self._keeps_residual = self._reads_residual or spec.keeps_residual
        # With constant statistics, dx needs no x if there is no activation, or relu's mask.
        self._keeps_x = not (self._constant and spec.activation in (None, "relu"))
        self._layout = x.shape, x.stride(), x.dtype
        self.is_recomputable = self._keeps_residual or not has_residual
        self.is_recomputable &= x.numel() > 0 and spec.pool is None and self._keeps_x
        self._machine = machine_of(x, self.peers is None)

    def _forward(self, constants: Constants) -> tuple[Launch, tuple[int, int]]:
        """The launch of a forward, or of a part of it, and its scratch memory."""
        constants = replace(
            constants,
            residual=self._has_residual,
            residual_norm=self._residual_norm,
        )
        momentum = 0.0
        world = 1
        if not constants.given:
            world = self._world
            constants = replace(
                constants,
                training=self.spec.training,
                safe=self.spec.safe and self._updates["running"],
                world=world,
                **self._updates,
            )
            momentum = self.spec.momentum or 0.0
        shape = schedule.geometry(*self._shape, 1, *self._machine)
        is_planes = isinstance(shape, Planes)
        launch = Launch(
            planes.batch_norm_planes_forward
            if is_planes
            else columns.batch_norm_columns_forward,
            shape.forward(constants.training, constants.normalize),
            constants,
            PEERS=self._table_of(world),
            momentum=momentum,
            eps=self.spec.eps,
            root=self._root,
        )
        return launch, shape.scratch()

    def _backward(
        self,
        shape: Geometry,
        needs: tuple[bool, bool, bool, bool, bool],
        share: bool = False,
    ) -> Launch:
        """The launch of a backward; `needs`: of dx, dweight, dbias, dstats and dresidual."""
        dx, dweight, dbias, dstats, dresidual = needs
        late = self.spec.training and (dx or (dresidual and self._residual_norm))
        sums = late or dweight or dbias or dstats or share
        world = self._world if late or share else 1
        constants = replace(
            self._constants,
            sums=sums,
            late=late,
            share=share,
            residual=self._reads_residual,
            residual_norm=self._residual_norm,
            dx=dx,
            dresidual=dresidual,
            dweight=dweight,
            dbias=dbias,
            dstats=dstats,
            world=world,
        )
        is_planes = isinstance(shape, Planes)
        return Launch(
            planes.batch_norm_planes_backward
            if is_planes
            else columns.batch_norm_columns_backward,
            shape.backward(sums, late),
            constants,
            PEERS=self._table_of(world),
            root=self._root,
        )

    def _table_of(self, world: int) -> int:
        """The address of the process's table, if a launch exchanges statistics."""
        return 0 if self.peers is None or world == 1 else self.peers.table

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        x, spec = t.x, self.spec
        launch, scratch = self._forward(replace(self._constants, normalize=True))
        empties: dict[str, Layout] = {"y": (x.shape, x.stride(), x.dtype)}
        if not self._residual_norm:
            size = 2 * self._channels + (self.peers is not None)
            empties["stats"] = ((size,), (1,), self.acc)
        if self._constants.bits:
            mask_bytes = schedule.mask_bytes(*self._shape)
            empties["bits"] = ((mask_bytes,), (1,), torch.uint8)
        kept = "residual" if self._keeps_residual else "nothing"
        saved = (kept, "weight", "bias", "input_bias", "stats", "bits")
        return Program(
            named(t),
            (launch, self._renamed),
            empties=empties,
            saved=("x" if self._keeps_x else "nothing", *saved),
            updates=RUNNING if spec.training else (),
            counts=self._counts,
            scratch=scratch,
        )

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        x = saved["x"]  # normalised by the saved statistics
        constants = replace(self._constants, normalize=True, given=True, bits=False)
        launch, _ = self._forward(constants)
        empties = {"y": (x.shape, x.stride(), x.dtype)}
        return Program(saved, (launch, self._renamed), empties=empties)

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        x = self._stand_in("meta")
        dy = given["dy"]
        # Without an activation, dy is the residual's gradient.
        plain = self.spec.activation is None and not self._residual_norm
        copies = {} if lies_like(dy, x) else {"dy": x.stride()}
        through = needs[1] and not plain
        wanted = (needs[0], needs[2], needs[3], needs[4], through)
        empties = gradients_of({**given, "x": x}, wanted[:4])
        if through:
            empties["dresidual"] = (x.shape, x.stride(), x.dtype)
        for_residual = "dy" if plain and needs[1] else "dresidual"
        results = ("dx", for_residual, "dweight", "dbias", "dinput_bias")
        if not any(wanted):
            return Program(given, copies=copies, empties={}, results=results)
        tensors = 2 + self._residual_norm  # which are read twice
        shape = schedule.geometry(*self._shape, tensors, *self._machine)
        return Program(
            given,
            (self._backward(shape, wanted), {**self._renamed, "dstats": "dinput_bias"}),
            copies=copies,
            empties=empties,
            results=results,
            scratch=shape.scratch(self._residual_norm),
        )

    def _stand_in(self, device: Any) -> Tensor:
        """A tensor with the layout of x."""
        shape, stride, dtype = self._layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Tensors, Any, Tensor]:
        x, residual, weight, bias, norms, stats, *_ = saved
        spec = self.spec
        mean = var = None
        if x is None:  # the gradients do not depend on its values
            x = self._stand_in(self.device).zero_().requires_grad_()
        if spec.join:
            raise NotImplementedError(exchange.NO_SECOND_DERIVATIVE)
        if self._constants.bits and not self._residual_norm:
            # relu's mask as ones and zeros: the residual's gradient for a dy of ones.
            needs = (False, True, False, False, False)
            detached = (x.detach(), *saved[1:])
            _, mask, *_ = self.backward(detached, torch.ones_like(x), None, needs)
            assert mask is not None
            dy, spec = dy * mask, spec._replace(activation=None)
        if self._has_residual and not self._reads_residual:
            # The gradients do not depend on its values.
            residual = torch.zeros_like(x).requires_grad_()
        if not spec.training:
            mean, rstd = stats.chunk(2)
            var = torch_way.variance_of(rstd, spec.eps)
        return Tensors(x, residual, weight, bias, norms, mean, var), spec, dy


def machine_of(x: Tensor, alone: bool = True) -> tuple[int, bool]:
    """The number of multiprocessors, and whether cooperative launches may be used.

    alone: whether the call exchanges nothing with other processes. A cooperative launch needs all
        multiprocessors at once. While it waited for a peer, NCCL's kernels could not start on this
        GPU, and those on the peer's GPU would keep the peer's launch from starting.
    """
    return processors(x.device), COOPERATIVE and x.is_cuda and alone


class StatisticsPlan(BatchNormPlan):
    """The launch of `channel_stats` for a dense x; y: the channels' means, then their variances."""

    state = ()

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        launch, scratch = self._forward(replace(self._constants, variance=True))
        empties = {"y": ((2 * self._channels,), (1,), self.acc)}
        renamed = {"stats": "y", "y": "x"}
        return Program(named(t), (launch, renamed), empties=empties, scratch=scratch)

    def _expect_next(self, *_: Any) -> None:
        """Expect nothing: no layer of a model needs to follow."""


class ResidualPlan(StatisticsPlan):
    """The launch of the norm of a residual, for the call that adds its result.

    y, (6 * C,): room for that call's mean and rstd, then mean, rstd, gain (weight * root) and bias.
    If kernels join the batches of several processes, the number of values per channel follows.
    """

    def jobs(self, t: Tensors, keep: bool) -> tuple[list[Job], list[Job]]:
        """The kernel: it has no backward."""
        return super().jobs(t, False)

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        launch, scratch = self._forward(replace(self._constants, for_residual=True))
        size = 6 * self._channels + (self.peers is not None)
        return Program(
            named(t),
            (launch, {"stats": "y", "y": "x"}),
            empties={"y": ((size,), (1,), self.acc)},
            updates=RUNNING,
            counts=self._counts,
            scratch=scratch,
        )


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
        self._window = Window(
            pool.kernel, pool.stride, pool.padding, self._size, self._pooled
        )
        self._joined = self.peers is not None

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        spec, constants = self.spec, self._constants
        height, width = self._pooled
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if spec.training:
            launch, scratch = self._forward(Constants(acc=constants.acc))
            steps.append((launch, {"weight": "partial", "bias": "partial", "y": "x"}))
        pooling = Constants(
            acc=constants.acc,
            training=spec.training,
            weight=constants.weight,
            bias=constants.bias,
            peaks=keep,
        )
        kernel = windows.batch_norm_pool_forward
        forward = self._launch(kernel, self._n * height, width, pooling, eps=spec.eps)
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
            counts=self._counts,
            scratch=scratch,
        )

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        """The program: the sums by channel, in the dtype of stats, and then dx."""
        training = self.spec.training
        is_laid_out = given["dy"].is_contiguous(memory_format=torch.channels_last)
        through = needs[0] and training
        summed = (needs[2] or through, needs[3] or through)
        steps: list[tuple[Launch, dict[str, str]]] = []
        scratch = (0, 0)
        if any(summed):
            shape = (
                self._n,
                self._channels,
                math.prod(self._pooled),
                True,
                self._dtype.itemsize,
            )
            geometry = schedule.geometry(*shape, 2, *self._machine)
            scratch = geometry.scratch()
            wanted = (False, *summed, False, False)
            launch = self._backward(geometry, wanted, share=self._joined and through)
            steps.append((launch, {"x": "peaks", "dx": "message"}))
        if needs[0]:
            # The schedule's pixels are blocks of sh * sw inputs.
            sh, sw = self._window.stride
            height, width = self._size
            rows = self._n * -(-height // sh)
            blocks = -(-width // sw)
            constants = Constants(
                acc=self._constants.acc,
                training=training,
                joined=self._joined,
                weight=self._constants.weight,
            )
            launch = self._launch(
                windows.batch_norm_pool_backward, rows, blocks, constants
            )
            sums = {"dweight": "message"} if self._joined and training else {}
            steps.append((launch, sums))
        channels = ((self._channels,), (1,), self.acc)
        empties = gradients_of(given, needs[:1])
        empties |= {
            f"d{n}": channels
            for n, s in zip(("weight", "bias"), summed, strict=True)
            if s
        }
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

    def _launch(
        self, kernel: Any, rows: int, width: int, constants: Constants, **numbers: float
    ) -> Launch:
        """The launch of a kernel of `windows` over `rows` rows of `width` pixels."""
        pixels = schedule.pixels(rows, width, self._channels, self._dtype.itemsize)
        return Launch(
            kernel, pixels.work(self._window), constants, root=self._root, **numbers
        )
