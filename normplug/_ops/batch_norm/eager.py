"""BatchNorm by normplug's own kernels: one launch forward and one backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from normplug import native
from normplug._activations import backward_reads_input
from normplug._kernels.batch_norm import launches, schedule
from normplug._kernels.batch_norm.exchange import CHANNELS
from normplug._kernels.device import processors
from normplug._kernels.launch import COOPERATIVE
from normplug._layouts import dense, laid_out_like, lies_like
from normplug._ops import cache, eligible, likely
from normplug._ops.batch_norm import aten
from normplug._ops.batch_norm.peers import NO_SECOND_DERIVATIVE
from normplug._ops.plans import BLANKS, BasePlan, KernelRoute, Needs, Plan
from normplug._ops.program import NOTHING, RUNNING, SLOT, Program, Result, named
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug._ops.statistics import variance_of
from normplug._torch import interposed
from normplug.reference import accumulator_dtype

_MOST_JOINED: int = CHANNELS.value  # channels of a layer over several processes


class BatchNormPlan(Plan):
    """The launches of a BatchNorm, with residual and activation. State: stats and bits.

    stats: mean and rstd of the channels, (2 * C,). bits: relu's mask, saved if there is a residual.
    """

    spec: BatchNormSpec
    state = ("stats", "bits")

    def __init__(self, t: Tensors, spec: BatchNormSpec) -> None:
        super().__init__(t, spec)
        x = t.x
        self._channels = x.shape[1]
        self._running_dtype = None if t.running_mean is None else t.running_mean.dtype
        self._shape = shape_of(x)
        updates = spec.training and t.running_mean is not None
        self._flags = launches.Flags(
            training=spec.training,
            weight=t.weight is not None,
            bias=t.bias is not None,
            residual=t.residual is not None,
            activation=spec.activation,
            running=t.running_mean is not None,
            cumulative=updates and spec.momentum is None,
            tracked=updates and t.tracked is not None and spec.momentum is not None,
            **group_of(spec),
        )
        self.mark = 0 if spec.peers is None else spec.peers.mark
        self._mask_bytes = schedule.mask_bytes(*self._shape) if self._flags.bits else 0
        self._reads_residual = self._flags.residual and backward_reads_input(spec.activation)
        self._keeps_residual = self._reads_residual or spec.keeps_residual
        self.is_recomputable = self._keeps_residual or not self._flags.residual
        self.is_recomputable &= x.numel() > 0
        self._machine = machine_of(x, spec.peers is None)

    @classmethod
    def refusal(cls, t: Tensors, spec: BatchNormSpec) -> str | None:
        """Why the kernels cannot run a call; None if they can."""
        if t.residual is not None and t.residual.dtype != t.x.dtype:
            return f"the input is {t.x.dtype} and the residual {t.residual.dtype}"
        running = (t.running_mean, t.running_var)
        if len({r.dtype for r in running if r is not None}) > 1:
            return "running_mean and running_var differ in dtype"
        if spec.peers is not None and t.x.shape[1] > _MOST_JOINED:
            return f"it has more than {_MOST_JOINED} channels"
        if spec.peers is not None and t.x.numel() == 0:  # the kernels do not read it
            t = t._replace(x=t.x.new_empty(1, *t.x.shape[1:2]), residual=None)
        why = super().refusal(t, spec)
        if why is None and t.x.shape[0] * math.prod(t.x.shape[2:]) >= 2**31:
            why = "a channel has 2^31 values or more"
        return why

    @classmethod
    def laid_out(cls, t: Tensors, spec: BatchNormSpec) -> tuple[Tensors, BatchNormSpec]:
        """The call with x dense, and the residual in the layout of x."""
        x, residual = dense(t.x), t.residual
        if residual is not None and residual.stride() != x.stride():
            residual = laid_out_like(residual, x)
        if x is t.x and residual is t.residual:
            return t, spec
        if residual is not t.residual:  # saving the copy would cost memory: nothing else holds it
            spec = spec._replace(keeps_residual=False)
        return t._replace(x=x, residual=residual), spec

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        """The program of y: one launch."""
        x, spec = t.x, self.spec
        geometry = schedule.geometry(*self._shape, 1, *self._machine)
        launch = launches.forward_launch(
            geometry, x.dtype, self._flags, spec.momentum or 0.0, spec.eps, spec.target_variance
        )
        empties = {
            "y": (x.shape, x.stride(), x.dtype),
            "stats": ((2 * self._channels + (spec.peers is not None),), (1,), self.acc),
        }
        if self._mask_bytes:
            empties["bits"] = ((self._mask_bytes,), (1,), torch.uint8)
        kept = "residual" if self._keeps_residual else "nothing"
        return Program(
            named(t),
            empties=empties,
            launches=[(launch, {})],
            results=[Result(SLOT["y"])],
            saved=("x", kept, "weight", "bias", "nothing", "stats", "bits"),
            updates=RUNNING if spec.training else (),
            counts=self._flags.cumulative,
            scratch=launches.scratch(geometry),
        )

    def likely_plans(self, t: Tensors, call: likely.Call) -> Iterator[tuple[Plan, Tensors]]:
        """Plans for a layer that is called as `call`, each with its tensors, if t came first."""
        return likely_plans(t, self.spec, call)

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        """The program that recomputes y, normalised by the saved statistics."""
        x, spec = saved["x"], self.spec
        flags = launches.Flags(
            training=False,
            given=True,
            weight=self._flags.weight,
            bias=self._flags.bias,
            residual=self._flags.residual,
            activation=self._flags.activation,
        )
        geometry = schedule.geometry(*self._shape, 1, *self._machine)
        numbers = (0.0, spec.eps, spec.target_variance)
        launch = launches.forward_launch(geometry, x.dtype, flags, *numbers)
        return Program(
            saved,
            empties={"y": (x.shape, x.stride(), x.dtype)},
            launches=[(launch, {})],
            results=[Result(SLOT["y"])],
        )

    def backward_program(
        self, saved: dict[str, Tensor], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program of the gradients: one launch."""
        x, plain = saved["x"], self.spec.activation is None
        assert dy is not None
        copies = {} if lies_like(dy, x) else {"dy": x.stride()}
        # Without an activation, dy is the residual's gradient.
        through = needs[1] and not plain
        wanted = (needs[0], needs[2], needs[3], through)
        empties = {
            f"d{name}": (saved[name].shape, saved[name].stride(), saved[name].dtype)
            for name, want in zip(("x", "weight", "bias"), wanted, strict=False)
            if want and name in saved
        }
        if through:
            empties["dresidual"] = (x.shape, x.stride(), x.dtype)
        found = [
            (needs[0], "dx"),
            (needs[1], "dy" if plain else "dresidual"),
            (needs[2], "dweight"),
            (needs[3], "dbias"),
            (False, "dinput_bias"),
        ]
        results = [Result(SLOT[name]) if want else NOTHING for want, name in found]
        if not any(wanted):
            return Program(saved, copies=copies, empties={}, launches=[], results=results)
        geometry = schedule.geometry(*self._shape, 2, *self._machine)
        launch = launches.backward_launch(
            geometry, x.dtype, self._flags, wanted, self.spec.target_variance
        )
        return Program(
            {**saved, "dy": dy},
            copies=copies,
            empties=empties,
            launches=[(launch, {})],
            results=results,
            scratch=launches.scratch(geometry),
        )

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""
        x, residual, weight, bias, _, stats, bits = saved
        spec, activation = self.spec, self.spec.activation
        if spec.peers is not None:
            raise NotImplementedError(NO_SECOND_DERIVATIVE)
        if bits is not None:
            # relu's mask as ones and zeros: the residual's gradient for a dy of ones.
            needs = (False, True, False, False, False)
            detached = (x.detach(), *saved[1:])
            _, mask, *_ = self.backward(detached, torch.ones_like(x), None, needs)
            assert mask is not None
            dy, activation = dy * mask, None
        if self._flags.residual and not self._reads_residual:
            # The gradients do not depend on its values.
            residual = torch.zeros_like(x).requires_grad_()
        mean, var = constants_of(stats, spec, self._running_dtype)
        t = Tensors(x, residual, weight, bias, None, mean, var)
        plain = BatchNormSpec(spec.training, 0.0, spec.eps, spec.target_variance, activation)
        return (x, residual, weight, bias, None), aten.batch_norm(t, plain), dy


KERNELS = KernelRoute(BatchNormPlan)


def group_of(spec: BatchNormSpec) -> dict[str, Any]:
    """The flags of a call's launches over several processes."""
    peers = spec.peers
    return {} if peers is None else {"world": peers.world, "peers": peers.table}


def shape_of(x: Tensor) -> tuple[int, int, int, bool, int]:
    """A dense x as the schedule sees it: n, c, values per plane, channels_last, bytes per value."""
    planes = math.prod(x.shape[2:])
    return x.shape[0], x.shape[1], planes, not x.is_contiguous(), x.element_size()


def machine_of(x: Tensor, alone: bool = True) -> tuple[int, bool]:
    """The number of multiprocessors, and whether cooperative launches may be used.

    alone: whether the call exchanges nothing with other processes. A cooperative launch needs all
        multiprocessors at once. While it waited for a peer, NCCL's kernels could not start here,
        and NCCL's kernels there would keep the peer's launch from starting.
    """
    return processors(x.device), COOPERATIVE and x.is_cuda and alone


def constants_of(
    stats: Tensor, spec: BatchNormSpec, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """The running statistics that a forward in eval mode used; None in training."""
    if spec.training:
        return None, None
    mean, rstd = stats.chunk(2)
    var = variance_of(rstd, spec.eps)
    return (mean, var) if dtype is None else (mean.to(dtype), var.to(dtype))


def likely_plans(
    t: Tensors, spec: BatchNormSpec, call: likely.Call
) -> Iterator[tuple[Plan, Tensors]]:
    """As `BatchNormPlan.likely_plans`, where t was called with `spec`."""
    activation, has_residual, _ = call.operations
    its = spec._replace(activation=activation, pool=None, keeps_residual=False)
    for x in likely.images(t.x, *call.shape):
        residual = torch.empty_like(x, requires_grad=True) if has_residual else None
        weight, bias, mean, var = (
            likely.vector(v, call.shape) for v in (t.weight, t.bias, t.running_mean, t.running_var)
        )
        other = Tensors(x, residual, weight, bias, None, mean, var, t.tracked)
        yield BatchNormPlan(other, its), other


def _statistics_program(x: Tensor) -> Program:
    """The program of stats: mean and biased variance of the channels of a dense x."""
    geometry = schedule.geometry(*shape_of(x), 1, *machine_of(x))
    flags = launches.Flags(weight=False, bias=False, normalize=False, variance=True)
    launch = launches.forward_launch(geometry, x.dtype, flags, 0.0, 0.0, 1.0)
    return Program(
        {"x": x},
        empties={"stats": ((2 * x.shape[1],), (1,), accumulator_dtype(x.dtype))},
        launches=[(launch, {})],
        results=[Result(SLOT["stats"])],
        scratch=launches.scratch(geometry),
    )


class StatisticsPlan(BasePlan):
    """The plan of `channel_stats` for a dense x."""

    state = ()

    def __init__(self, t: Tensors) -> None:
        super().__init__(t, None)
        self._program = _statistics_program(t.x)

    def forward_of(self, t: Sequence[Tensor | None], keep: bool) -> Program:
        """The program, whatever the arguments. The host path in C++ calls this by name."""
        return self._program

    def run(self, t: Tensors) -> Tensor:
        """The channels' means, then their variances."""
        if (stats := native.run(self, t)) is not None:
            return stats
        slots = [*t, *BLANKS]
        with torch.cuda.device_of(t.x):
            self._program.run(slots, self.device, self.workspace)
        return self._program.results_of(slots)[0]


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """`functional.channel_stats`, in one read of x; None if the kernels cannot run."""
    t = Tensors(dense(x.detach()))
    stats = native.call(None, "channel_stats", t)
    if stats is None:
        plain = BatchNormSpec(True, 0.0, 0.0, 1.0)
        if interposed() or eligible.refusal_now() or KERNELS.refusal(t, plain):
            return None
        key = cache.key_of(t, None, "channel_stats")
        run = cache.made_once(key, StatisticsPlan, t).run
        native.keep(None, "channel_stats", t, run)
        stats = run(t)
    mean, var = stats.chunk(2)
    return mean, var
