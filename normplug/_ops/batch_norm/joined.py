"""BatchNorm over the joined batch of several processes, by normplug's own kernels.

Forward: a launch for the statistics of the process's batch, one gather, a launch that merges the
statistics of all and updates the running ones, and a launch that normalises, with residual and
activation. Backward: a launch for the two sums and the gradients of weight and bias, one sum over
the processes, and a launch for the gradients of input and residual. The host never waits.

A process with an empty batch sends zeros, and merges as the others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normplug import _activations, _checks
from normplug._kernels.batch_norm import launches, schedule
from normplug._kernels.launch import Launch, Workspace
from normplug._layouts import laid_out_like, readable
from normplug._ops.batch_norm import messages
from normplug._ops.batch_norm.eager import BatchNormPlan, machine_of, shape_of
from normplug._ops.program import increment_versions
from normplug._ops.recompute import Recomputable
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug._ops.statistics import variance_of
from normplug._torch import applier, current_device_index, current_raw_stream, unwrap_if_dead
from normplug.reference import accumulator_dtype, per_channel

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class JoinedPlan:
    """The launches for calls that differ only in their tensors' values and their group.

    A call computes stats, (2 * C + 1,): mean and rstd of each channel of the joined batch, and the
    number of values per channel.
    """

    def __init__(self, t: Tensors, spec: BatchNormSpec, processes: int) -> None:
        ready, spec = BatchNormPlan.laid_out(t, spec)
        self._copies = ready is not t
        x, c = ready.x, ready.x.shape[1]
        self.spec = spec
        self.acc = accumulator_dtype(x.dtype)
        # The GPU that must be current at a launch; None on the CPU.
        self.gpu = x.device.index if x.is_cuda else None
        self._device, self._dtype, self._processes, self._channels = x.device, x.dtype, processes, c
        self._is_empty = x.numel() == 0
        self._has_residual = t.residual is not None
        reads_input = _activations.backward_reads_input(spec.activation)
        self._reads_residual = self._has_residual and reads_input
        self.keeps_residual = self._reads_residual or spec.keeps_residual
        self.is_recomputable = self.keeps_residual or not self._has_residual
        self._work: Workspace | None = None
        self._scratch = (0, 0)
        running = t.running_mean is not None
        merging = launches.Flags(
            running=running,
            cumulative=running and spec.momentum is None,
            tracked=running and t.tracked is not None,
        )
        self._merge = launches.merge_launch(
            processes, c, x.dtype, merging, spec.momentum or 0.0, spec.eps
        )
        self._sums: dict[tuple[bool, bool, bool], Launch] = {}
        self._dx: dict[bool, Launch] = {}
        if not self._is_empty:
            self._set_up(ready)

    def _set_up(self, t: Tensors) -> None:
        """Set up the launches that an empty batch does not need."""
        spec, shape, machine = self.spec, shape_of(t.x), machine_of(t.x)
        once, twice = (schedule.geometry(*shape, tensors, *machine) for tensors in (1, 2))
        needs = (launches.scratch(geometry) for geometry in (once, twice))
        counters, room = (max(sizes) for sizes in zip(*needs, strict=True))
        self._scratch = (counters, room)
        self._geometry = twice
        own = launches.Flags(weight=False, bias=False, normalize=False, variance=True, joined=True)
        self._statistics = launches.forward_launch(once, t.x.dtype, own, 0.0, spec.eps, 1.0)

        def flags(training: bool, given: bool) -> launches.Flags:
            return launches.Flags(
                training=training,
                given=given,
                weight=t.weight is not None,
                bias=t.bias is not None,
                residual=self._has_residual,
                activation=spec.activation,
                joined=True,
            )

        normalising = flags(training=False, given=True)
        self._normalise = launches.forward_launch(
            once, t.x.dtype, normalising, 0.0, spec.eps, spec.target_variance
        )
        self._mask_bytes = schedule.mask_bytes(*shape) if normalising.bits else 0
        self._summing = flags(training=True, given=False)
        self._given = flags(training=True, given=True)

    @classmethod
    def refusal(cls, t: Tensors, spec: BatchNormSpec) -> str | None:
        """Why the kernels cannot run a call; None if they can."""
        if t.x.numel() == 0:  # the kernels do not read it
            t = t._replace(x=t.x.new_empty(1, *t.x.shape[1:2]))
        return BatchNormPlan.refusal(t, spec)

    def run(self, t: Tensors, group: Any) -> tuple[Tensor, Tensor]:
        """Compute y, recorded for autograd if gradients are enabled, and stats."""
        if self.gpu is not None and self.gpu != current_device_index():
            with torch.cuda.device(self.gpu):
                return self.run(t, group)
        if self._copies:
            t, _ = BatchNormPlan.laid_out(t, self.spec)
        stats = t.x.new_empty(2 * self._channels + 1, dtype=self.acc)
        if not torch.is_grad_enabled():
            return self.forward(t, group, stats)[0], stats
        # Remove wrappers that a torch.func transform has left on the tensors at its end.
        x, residual = unwrap_if_dead(t.x), t.residual
        if residual is not None:
            residual = unwrap_if_dead(residual)
        if x is not t.x or residual is not t.residual:
            t = t._replace(x=x, residual=residual)
        return _apply(x, residual, t.weight, t.bias, (self, t, group, stats)), stats

    def moments(self, stats: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of the joined batch."""
        mean, rstd, _ = stats.tensor_split((self._channels, 2 * self._channels))
        return mean, variance_of(rstd, self.spec.eps)

    def forward(
        self, t: Tensors, group: Any, stats: Tensor
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Compute y, and the tensors to save; fills `stats`."""
        x, residual, weight, bias, _, running_mean, running_var, tracked = t
        stream, work = self._workspace()
        # A placeholder for absent tensors, which the kernels never dereference.
        nothing = work.counters
        if self._is_empty:
            own = torch.zeros_like(stats)
        else:
            own = torch.empty_like(stats)
            self._statistics(
                stream, x, x, own, own, own, own, nothing, x, x, own, work.partial, work.counters
            )
        parts = messages.gather(own, self._processes, group)
        self._merge(
            stream,
            parts,
            stats if running_mean is None else running_mean,
            stats if running_var is None else running_var,
            nothing if tracked is None else tracked,
            stats,
        )
        increment_versions([r for r in (running_mean, running_var, tracked) if r is not None])
        if self.gpu is None and stats[-1] == 1:
            raise _checks.one_joined_value(self._processes)
        y, bits = torch.empty_like(x), None
        if not self._is_empty:
            if self._mask_bytes:
                bits = x.new_empty(self._mask_bytes, dtype=torch.uint8)
            self._write(stream, work, y, (x, residual, weight, bias, stats, bits))
        kept = residual if self.keeps_residual else None
        return y, (x, kept, weight, bias, stats, bits)

    def recomputed(self, saved: Sequence[Any]) -> Tensor:
        """Recompute the output y. This also rewrites the bits, with the same values."""
        y = torch.empty_like(saved[0])
        if not self._is_empty:
            self._write(*self._workspace(), y, saved)
        return y

    def _write(self, stream: int, work: Workspace, y: Tensor, saved: Sequence[Any]) -> None:
        x, residual, weight, bias, stats, bits = saved
        self._normalise(
            stream,
            x,
            x if residual is None else residual,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats,
            stats,
            work.counters,
            y,
            x if bits is None else bits,
            stats,
            work.partial,
            work.counters,
        )

    def backward(
        self, saved: Sequence[Any], group: Any, dy: Tensor, needs: Sequence[bool]
    ) -> Gradients:
        """The gradients of x, residual, weight and bias that `needs` selects."""
        x, residual, weight, bias, stats, bits = saved
        if self._is_empty:
            if needs[0]:
                messages.add(stats.new_zeros(2 * self._channels), group)
            dx, dresidual, dweight, dbias = (
                torch.zeros_like(of) if need and of is not None else None
                for need, of in zip(needs, (x, x, weight, bias), strict=False)
            )
            return dx, dresidual, dweight, dbias
        if dy.stride() != x.stride():
            dy = laid_out_like(dy, x)
        through, dresidual = needs[1], None
        if through:
            if self.spec.activation is None:
                through, dresidual = False, dy
            else:
                dresidual = torch.empty_like(x)
        dweight = torch.empty_like(weight) if needs[2] else None
        dbias = torch.empty_like(bias) if needs[3] else None
        sums = stats.new_empty(2 * self._channels)
        stream, work = self._workspace()
        read = (
            dy,
            x,
            x if residual is None else residual,
            x if bits is None else bits,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats,
        )
        vectors = (stats if dweight is None else dweight, stats if dbias is None else dbias)
        dresidual_or_x = x if dresidual is None else dresidual
        # The launch of dx writes dresidual, too. Without dx, this launch has to.
        wanted = (needs[2], needs[3], through and not needs[0])
        launch = self._sums.get(wanted) or self._set_up_sums(wanted)
        launch(stream, *read, sums, dresidual_or_x, *vectors, work.partial, work.counters)
        if not needs[0]:
            return None, dresidual, dweight, dbias
        messages.add(sums, group)
        dx = torch.empty_like(x)
        launch = self._dx.get(through) or self._set_up_dx(through)
        launch(stream, *read, dx, dresidual_or_x, *vectors, sums, work.counters)
        return dx, dresidual, dweight, dbias

    def _set_up_sums(self, needs: tuple[bool, bool, bool]) -> Launch:
        """Set up the launch of the sums. needs: of dweight, dbias and dresidual."""
        launch = self._sums[needs] = launches.backward_launch(
            self._geometry, self._dtype, self._summing, (False, *needs), self.spec.target_variance
        )
        return launch

    def _set_up_dx(self, dresidual: bool) -> Launch:
        needs = (True, False, False, dresidual)
        launch = self._dx[dresidual] = launches.backward_launch(
            self._geometry, self._dtype, self._given, needs, self.spec.target_variance
        )
        return launch

    def composed_backward(
        self, saved: Sequence[Any], group: Any, dy: Tensor, needs: Sequence[bool]
    ) -> Gradients:
        """As `backward`, by torch operations, which autograd can differentiate again."""
        with torch.autocast(dy.device.type, enabled=False):
            inputs, y, dy = self._composed(saved, group, dy)
            wanted = [need and t is not None for need, t in zip(needs, inputs, strict=False)]
            asked = [t for t, want in zip(inputs, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(y, asked, dy, create_graph=True) if asked else ())
        dx, dresidual, dweight, dbias = (next(found) if want else None for want in wanted)
        return dx, dresidual, dweight, dbias

    def _composed(
        self, saved: Sequence[Any], group: Any, dy: Tensor
    ) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""
        x, residual, weight, bias, stats, bits = saved
        spec, activation = self.spec, self.spec.activation
        if bits is not None:
            # relu's mask as ones and zeros: the residual's gradient for a dy of ones.
            detached = (x.detach(), *saved[1:])
            needs = (False, True, False, False)
            _, mask, *_ = self.backward(detached, group, torch.ones_like(x), needs)
            assert mask is not None
            dy, activation = dy * mask, None
        if self._has_residual and not self._reads_residual:
            # The gradients do not depend on its values.
            residual = torch.zeros_like(x).requires_grad_()
        mean, rstd = messages.differentiable_statistics(x, stats[-1].clamp(min=1), spec.eps, group)
        scale = rstd * math.sqrt(spec.target_variance)
        if weight is not None:
            scale = scale * weight.to(self.acc)
        y = (x.to(self.acc) - per_channel(mean, x)) * per_channel(scale, x)
        if bias is not None:
            y = y + per_channel(bias.to(self.acc), x)
        if residual is not None:
            y = y + residual
        y = _activations.apply(activation, y)
        return (x, residual, weight, bias), y.to(x.dtype), dy

    def _workspace(self) -> tuple[int, Workspace]:
        """The current stream, and a workspace on it."""
        stream = 0 if self.gpu is None else current_raw_stream(self.gpu)
        if stream != 0 or self.gpu is None:
            return stream, Workspace(self._device, self.acc, *self._scratch)
        if self._work is None:
            self._work = Workspace.get(self._device, self.acc, *self._scratch)
        return stream, self._work


class _JoinedNorm(Recomputable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        call: tuple[JoinedPlan, Tensors, Any, Tensor],
    ) -> Tensor:
        plan, t, group, stats = call
        y, saved = plan.forward(t, group, stats)
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.group = plan, group
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors
        dy = readable(dy)
        backward = plan.composed_backward if torch.is_grad_enabled() else plan.backward
        if plan.gpu is not None and plan.gpu != current_device_index():
            with torch.cuda.device(plan.gpu):
                return (*backward(saved, ctx.group, dy, ctx.needs_input_grad), None)
        return (*backward(saved, ctx.group, dy, ctx.needs_input_grad), None)


_apply = applier(_JoinedNorm)
