"""Plans of calls by the kernels, their autograd function, and second derivatives.

A plan serves all calls with equal shapes, layouts, dtypes and specs; its launches are set up once.
A call is then one or two launches in each direction. Second derivatives are computed by torch's own
operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from normplug import native
from normplug._layouts import readable
from normplug._ops.program import SLOT, SLOTS, Program
from normplug._ops.spec import Tensors
from normplug._torch import (
    applier,
    current_device_index,
    current_raw_stream,
    recordings,
    unwrap_if_dead,
)
from normplug.reference import accumulator_dtype

if TYPE_CHECKING:
    from normplug._kernels.launch import Workspace

# The gradients of x, residual, weight, bias and input_bias.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Needs = tuple[bool, ...]  # which of these to compute
_INPUTS = 5
BLANKS = [None] * (len(SLOTS) - len(Tensors._fields))
_Y, _TOTAL, _DY, _DTOTAL = (SLOT[name] for name in ("y", "total", "dy", "dtotal"))


class BasePlan:
    """The programs for calls that differ only in their tensors' values, and what they run on.

    A forward saves (x, residual, weight, bias, input_bias, *state) for the backward. An input that
    the backward does not read is None. `state` names the tensors that the kernels compute for it.
    """

    state: ClassVar[tuple[str, ...]]
    # What the launches depend on, besides the call: facts about the GPU.
    _machine: Any
    # The address of the mark by which kernels say that they have given up; 0 if they never do.
    mark = 0
    # Whether the forward returns (y, x + residual).
    has_total = False
    # Whether y can be recomputed, bit for bit, from the tensors that the forward saved.
    is_recomputable = False

    def __init__(self, t: Tensors, spec: Any) -> None:
        self.spec = spec
        self.acc = accumulator_dtype(t.x.dtype)
        self.device = t.x.device
        # The GPU that must be current at a launch; None on the CPU.
        self.gpu = self.device.index if t.x.is_cuda else None
        self.saved_slots = (*range(_INPUTS), *(SLOT[name] for name in self.state))
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._programs: dict[Any, Program] = {}

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        """The program that recomputes y, of a plan that `is_recomputable`.

        saved: the tensors that the forward saved, by slot, without those that are None.
        """
        raise NotImplementedError

    def recompute_of(self, saved: Sequence[Any]) -> Program:
        """The program of `recomputed`."""
        return self._made_once("recompute", self.recompute_program, saved)

    def recomputed(self, saved: Sequence[Any]) -> Tensor:
        """Recompute the output y."""
        program = self.recompute_of(saved)
        slots = self._slots(saved)
        program.run(slots, self.device, self.workspace)
        return program.results_of(slots)[0]

    def workspace(self, scratch: tuple[int, int]) -> tuple[int, Workspace]:
        """The current stream, and a workspace on it of `scratch`: (counters, partial results)."""
        from normplug._kernels.launch import Workspace

        stream = 0 if self.gpu is None else current_raw_stream(self.gpu)
        if self.mark:
            self.spec.peers.take_turn(stream)
        if stream != 0 or self.gpu is None or recordings:  # it may be of fake tensors
            return stream, Workspace(self.device, self.acc, *scratch)
        work = self._workspaces.get(scratch)
        if work is None:
            work = self._workspaces[scratch] = Workspace.get(self.device, self.acc, *scratch)
        return stream, work

    def _made_once(
        self, key: Any, make: Callable[..., Program], saved: Sequence[Any], *args: Any
    ) -> Program:
        """The program of a key. `make` takes the saved tensors by slot, and `args`."""
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = make(self._named(saved), *args)
        return found

    def _slots(self, saved: Sequence[Any]) -> list[Any]:
        slots = [None] * len(SLOTS)
        for slot, t in zip(self.saved_slots, saved, strict=True):
            slots[slot] = t
        return slots

    def _named(self, saved: Sequence[Any]) -> dict[str, Tensor]:
        pairs = zip(self.saved_slots, saved, strict=True)
        return {SLOTS[slot]: t for slot, t in pairs if t is not None}


class Plan(BasePlan, ABC):
    """The plan of a norm that each process computes by itself."""

    def bound(self, t: Tensors) -> Callable[[Tensors], Any]:
        """The function that runs calls like t: `run`, unless torch operations have to follow."""
        return self.run

    def kernels(self, t: Tensors) -> list[str]:
        """The name and the number of warps of each kernel that a forward launches."""
        jobs = self.forward_program(t, torch.is_grad_enabled()).jobs(self.acc)
        return [f"{job.kernel.__name__} with num_warps={job.options['num_warps']}" for job in jobs]

    @abstractmethod
    def forward_program(self, t: Tensors, keep: bool) -> Program:
        """The program of y, or of (y, total). keep: whether to save tensors for a backward."""

    @abstractmethod
    def backward_program(
        self, saved: dict[str, Tensor], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program of the gradients that `needs` selects, in the order of `Gradients`.

        saved: the tensors that the forward saved, by slot, without those that are None.
        """

    @abstractmethod
    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""

    # The programs, each built once. The host path in C++ calls these methods by name, too.

    def forward_of(self, t: Sequence[Tensor | None], keep: bool) -> Program:
        """The program of a forward."""
        found = self._programs.get(keep)
        if found is None:
            found = self._programs[keep] = self.forward_program(Tensors(*t), keep)  # type: ignore[arg-type]
            is_on_gpu = self.gpu is not None and not recordings
            if is_on_gpu and not torch.cuda.is_current_stream_capturing():
                self._expect_next(Tensors(*t), found, keep)  # type: ignore[arg-type]
        return found

    def _expect_next(self, t: Tensors, forward: Program, keep: bool) -> None:
        """Have worker processes compile the kernels that follow the first, and the backward's."""
        from normplug._kernels import ahead

        jobs = forward.jobs(self.acc)[1:]  # this process compiles the first, by launching it
        for backward in self.usual_backwards(t, forward) if keep else ():
            jobs += backward.jobs(self.acc)
        for job in jobs:
            ahead.expect(job)

    def backward_of(
        self, saved: Sequence[Any], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program of a backward."""
        strides = [None if t is None else t.stride() for t in (dy, dtotal)]
        key = (needs, *strides)
        return self._made_once(key, self.backward_program, saved, dy, dtotal, needs)

    def usual_backwards(self, t: Tensors, forward: Program) -> list[Program]:
        """The programs of this forward's backward, if dy lies like y; none without gradients.

        If the forward returns a total, there are two: often nothing else reads it.
        """
        needs = tuple(a is not None and a.requires_grad for a in t[:_INPUTS])
        if not any(needs):
            return []
        slots: list[Any] = [*t, *BLANKS]
        for slot, shape, stride, dtype, _ in forward.empties:
            slots[slot] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        saved = [slots[slot] for slot in forward.saved]
        results = [slots[slot] for slot, _ in forward.results]
        usual = [[*results], [results[0], None]] if self.has_total else [[*results, None]]
        return [self.backward_of(saved, *gradients, needs) for gradients in usual]

    def run(self, t: Tensors) -> Any:
        """Run a call, and record it for autograd if gradients are enabled."""
        if unwrap_if_dead(t.x) is not t.x or t.residual is not None:
            t = unwrapped(t)
        if native._extension is not None and (result := native.run(self, t)) is not None:
            return result
        if self.gpu is not None and self.gpu != current_device_index():
            with torch.cuda.device(self.gpu):
                return self.run(t)
        if not torch.is_grad_enabled():
            return self.forward(t, False)[0]
        return _apply(*t[:_INPUTS], (self, t, None))

    def run_with_state(self, t: Tensors) -> tuple[Any, Sequence[Any]]:
        """Run a call in Python; return the result, and the tensors that `state` names."""
        if self.gpu is not None and self.gpu != current_device_index():
            with torch.cuda.device(self.gpu):
                return self.run_with_state(t)
        t, found = unwrapped(t), list[Any]()
        return _apply(*t[:_INPUTS], (self, t, found)), found

    def forward(self, t: Tensors, keep: bool) -> tuple[Any, tuple[Any, ...]]:
        """The result, and the tensors to save if `keep`."""
        program = self._programs.get(keep) or self.forward_of(t, keep)
        slots = [*t, *BLANKS]
        program.run(slots, self.device, self.workspace)
        saved = tuple(map(slots.__getitem__, program.saved)) if keep else ()
        y = slots[_Y]
        return ((y, slots[_TOTAL]) if self.has_total else y), saved

    def backward(
        self, saved: Sequence[Any], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Gradients:
        """Compute the gradients that `needs` selects."""
        dy = None if dy is None else readable(dy)
        dtotal = None if dtotal is None else readable(dtotal)
        program = self.backward_of(saved, dy, dtotal, needs)
        slots = self._slots(saved)
        slots[_DY], slots[_DTOTAL] = dy, dtotal
        program.run(slots, self.device, self.workspace)
        dx, dresidual, dweight, dbias, dinput_bias = program.results_of(slots)
        return dx, dresidual, dweight, dbias, dinput_bias

    def composed_backward(
        self, saved: Sequence[Any], dy: Tensor, dtotal: Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        """The gradients by torch operations, which autograd can differentiate again."""
        with torch.autocast(dy.device.type, enabled=False):
            gradients = differentiable_gradients(*self.composed(saved, dy), needs)
        dx, dresidual, dweight, dbias, dinput_bias = gradients
        return dx, dresidual, dweight, dbias, dinput_bias


def differentiable_gradients(
    inputs: Sequence[Any], y: Tensor, dy: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the inputs that `needs` selects, which autograd can differentiate again."""
    wanted = [need and t is not None for need, t in zip(needs, inputs, strict=True)]
    asked = [t for t, want in zip(inputs, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True) if asked else ())
    return [next(found) if want else None for want in wanted]


def unwrapped(t: Tensors) -> Tensors:
    """The call, without wrappers that a torch.func transform has left on its tensors at its end."""
    x = unwrap_if_dead(t.x)
    residual = None if t.residual is None else unwrap_if_dead(t.residual)
    if x is t.x and residual is t.residual:
        return t
    return t._replace(x=x, residual=residual)


def run_backward(ctx: Any, dy: Tensor, other: Any) -> tuple[Tensor | None, ...]:
    """The gradients of a function's inputs, by `ctx.plan`, and None for the last of them, the call.

    other: what the plan's backward takes beside dy.
    """
    plan, saved, needs = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[:-1]
    backward = plan.composed_backward if torch.is_grad_enabled() else plan.backward
    if plan.gpu is not None and plan.gpu != current_device_index():
        with torch.cuda.device(plan.gpu):
            return (*backward(saved, dy, other, needs), None)
    return (*backward(saved, dy, other, needs), None)


class _Norm(torch.autograd.Function):
    # Each tensor argument costs host time, so those without gradients are only in `call`.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        input_bias: Tensor | None,
        call: tuple[Plan, Tensors, list[Any] | None],
    ) -> Any:
        plan, t, found = call
        result, saved = plan.forward(t, found is not None or any(ctx.needs_input_grad))
        if found is not None:  # the caller wants the state
            found.extend(saved[_INPUTS:])
        ctx.save_for_backward(*saved)
        ctx.plan = plan
        if plan.has_total:
            ctx.set_materialize_grads(False)
            if not any(ctx.needs_input_grad[:2]):
                ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return run_backward(ctx, dy, dtotal)


_apply = applier(_Norm)
