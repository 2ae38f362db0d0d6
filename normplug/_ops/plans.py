"""Plans of calls by the kernels, their autograd function, and second derivatives.

A plan serves all calls with equal shapes, layouts, dtypes and specs; its launches are set up once.
A call is then one or two launches in each direction. Second derivatives are computed by torch's own
operations.

A plan describes its work as programs, which Python and C++ run alike. A program works on a list of
slots, one for each name that a tensor can have; the last is always None. It copies inputs whose
layout the kernels cannot read, allocates outputs, launches kernels, and names the slots of its
results and of the tensors that the backward will need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from normplug._layouts import readable
from normplug._ops import guess
from normplug._ops.spec import Tensors
from normplug._torch import (
    applier,
    current_device_index,
    current_raw_stream,
    unwrap_if_dead,
)
from normplug.reference import accumulator_dtype

if TYPE_CHECKING:
    from normplug._kernels import ahead
    from normplug._kernels.launch import Launch, Workspace

Gradients = Sequence[Tensor | None]  # of x, residual, weight, bias and input_bias
Needs = tuple[bool, ...]  # which of these to compute
_INPUTS = 5

SLOTS = (
    *Tensors._fields,
    "y", "total", "stats", "bits", "peaks", "places",
    "dy", "dtotal", "dx", "dresidual", "dweight", "dbias", "dinput_bias",
    "normalised", "message", "partial", "counters", "nothing",
)  # fmt: skip
SLOT = {name: index for index, name in enumerate(SLOTS)}
RUNNING = ("running_mean", "running_var", "tracked")
BLANKS = [None] * (len(SLOTS) - len(Tensors._fields))
_Y, _TOTAL, _DY, _DTOTAL = (SLOT[name] for name in ("y", "total", "dy", "dtotal"))
_TRACKED, _PARTIAL, _COUNTERS = (
    SLOT[name] for name in ("tracked", "partial", "counters")
)

# Placeholders for absent tensors. The kernel needs a pointer of the right dtype, but never
# dereferences it. For names that are not listed, the launch's first tensor serves.
_PLACEHOLDERS = {
    **dict.fromkeys(
        ("weight", "bias", "input_bias", "running_mean", "running_var"), "partial"
    ),
    **dict.fromkeys(("dweight", "dbias", "dinput_bias", "stats"), "partial"),
    "tracked": "counters",
    "total": "y",
    "normalised": "y",
}

Layout = tuple[Sequence[int], Sequence[int], torch.dtype]  # sizes, strides, dtype


class Step(NamedTuple):
    """A launch, the slots of its tensors, and `pick`, which takes these tensors from all slots."""

    launch: Launch
    slots: list[int]
    pick: Callable[[Sequence[Any]], tuple[Tensor, ...]]


class Program:
    """Copies, allocations and launches for tensors of known sizes, strides and dtypes.

    Args:
        given: the tensors that the slots hold at the start, by slot.
        launches: the launches, in order, each with a map from the kernel's argument to the slot
            for tensors whose slot has another name.
        empties: the layout of each tensor to allocate, by slot.
        results: the slots that are returned, each alone or with a dtype to cast to. A slot that is
            never filled gives None.
        saved: the slots that the backward will need, in the order that `Plan` documents.
        copies: slots whose tensors are copied first, and the strides they must have.
        updates: the slots whose tensors the launches update in place.
        counts: whether to increment `tracked` first.
        scratch: how many counters and how many partial results the launches need.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor],
        *launches: tuple[Launch, Mapping[str, str]],
        empties: Mapping[str, Layout],
        results: Sequence[str | tuple[str, torch.dtype | None]] = ("y",),
        saved: Sequence[str] = (),
        copies: Mapping[str, Sequence[int]] | None = None,
        updates: Sequence[str] = (),
        counts: bool = False,
        scratch: tuple[int, int] = (0, 0),
    ) -> None:
        self.empties = [(SLOT[name], *layout) for name, layout in empties.items()]
        dtypes = {name: t.dtype for name, t in given.items()}
        dtypes |= {name: dtype for name, (_, _, dtype) in empties.items()}
        self._dtypes = {SLOT[name]: dtype for name, dtype in dtypes.items()}
        self.steps = []
        for launch, renamed in launches:
            slots = []
            for name in launch.pointers:
                source = renamed.get(name, name)
                slots.append(self._slot_of(source, launch))
            self.steps.append(Step(launch, slots, itemgetter(*slots)))
        pairs = ((each, None) if isinstance(each, str) else each for each in results)
        self.results = [
            (SLOT[name], None if dtype == dtypes.get(name) else dtype)
            for name, dtype in pairs
        ]
        self.saved = [SLOT[name] for name in saved]
        self.copies = [(SLOT[name], strides) for name, strides in (copies or {}).items()]
        self.updates = [SLOT[name] for name in updates if name in given]
        self.counts, self.scratch = counts, scratch

    def _slot_of(self, name: str, launch: Launch) -> int:
        """The slot of a tensor of a launch, or of its placeholder if the call has none."""
        if SLOT[name] in self._dtypes or name in ("partial", "counters"):
            return SLOT[name]
        return SLOT[_PLACEHOLDERS.get(name, launch.pointers[0])]

    def run(self, slots: list[Any], plan: Plan) -> None:
        """Run the program of a plan, which fills the slots: a list as long as `SLOTS`."""
        device = plan.device
        if plan.gpu is not None and plan.gpu != current_device_index():
            with torch.cuda.device(device):
                self.run(slots, plan)
            return
        for slot, wanted in self.copies:
            t = slots[slot]
            copy = torch.empty_strided(t.shape, wanted, dtype=t.dtype, device=device)
            slots[slot] = copy.copy_(t)
        if self.counts and slots[_TRACKED] is not None:
            slots[_TRACKED].add_(1)
        for slot, shape, stride, dtype in self.empties:
            slots[slot] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if self.steps:
            stream, work = plan.workspace(self.scratch)
            slots[_PARTIAL], slots[_COUNTERS] = work.partial, work.counters
            for launch, _, pick in self.steps:
                launch(stream, *pick(slots))
        if self.updates:
            updated = map(slots.__getitem__, self.updates)
            increment_version(list(filterfalse(Tensor.is_inference, updated)))

    def jobs(self, accumulator: torch.dtype) -> list[ahead.Job]:
        """The jobs that compile the kernels; accumulator: the dtype of partial results."""
        dtypes = {_PARTIAL: accumulator, _COUNTERS: torch.int64, **self._dtypes}
        return [
            launch.job([dtypes[slot] for slot in slots])
            for launch, slots, _ in self.steps
        ]


def accumulator_of(t: Tensors) -> torch.dtype:
    """The dtype of a call's sums: float64 if an input is."""
    # torch.compile of torch 2.6 to 2.8 cannot trace a slice of a named tuple.
    return accumulator_dtype(*(None if a is None else a.dtype for a in (*t,)[:_INPUTS]))


def named(t: Tensors) -> dict[str, Tensor]:
    """The tensors of a call that are not None, by slot."""
    return {name: each for name, each in t._asdict().items() if each is not None}


def gradients_of(
    saved: Mapping[str, Tensor], wanted: Sequence[bool]
) -> dict[str, Layout]:
    """The layouts of the wanted gradients, of x, weight, bias and input_bias."""
    pairs = zip(("x", "weight", "bias", "input_bias"), wanted, strict=False)
    inputs = {name: saved[name] for name, want in pairs if want}
    return {f"d{name}": (t.shape, t.stride(), t.dtype) for name, t in inputs.items()}


def strides_of(
    shape: Sequence[int], memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    return torch.empty(shape, memory_format=memory_format, device="meta").stride()


class Plan:
    """The programs for calls that differ only in their tensors' values, and what they run on.

    A forward saves (x, residual, weight, bias, input_bias, *state) for the backward. An input that
    the backward does not read is None. `state` names the tensors that the kernels compute for it.
    """

    state: ClassVar[tuple[str, ...]]
    # The `peers.Peers` with which the kernels exchange statistics.
    peers: Any = None
    # Whether the forward returns (y, x + residual).
    has_total = False
    # Whether y can be recomputed, bit for bit, from the tensors that the forward saved.
    is_recomputable = False

    def __init__(self, t: Tensors, spec: Any) -> None:
        self.spec = spec
        self.acc = accumulator_of(t)
        self.device = t.x.device
        # The GPU that must be current at a launch; None on the CPU.
        self.gpu = self.device.index if t.x.is_cuda else None
        self.saved_slots = (*range(_INPUTS), *(SLOT[name] for name in self.state))
        self._given_slots = (*self.saved_slots, _DY, _DTOTAL)  # to a backward
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._programs: dict[Any, Program] = {}

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        """The program of y, or of (y, total). keep: whether to save tensors for a backward."""
        raise NotImplementedError

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        """The program of the gradients that `needs` selects, in the order of `Gradients`.

        given: which of the saved tensors, dy and dtotal are not None, by slot.
        """
        raise NotImplementedError

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        """The program that recomputes y, of a plan that `is_recomputable`."""
        raise NotImplementedError

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Tensors, Any, Tensor]:
        """The call that PyTorch differentiates for `composed_backward`: tensors, spec, and dy."""
        return Tensors(*saved[:_INPUTS]), self.spec._replace(autocast=None), dy

    # The programs, each built once. The host path in C++ calls these methods by name, too.

    def forward_of(self, t: Sequence[Tensor | None], keep: bool) -> Program:
        """The program of a forward."""
        program = self._programs.get(keep)
        if program is None:
            call = Tensors(*t)  # type: ignore[arg-type]
            program = self._programs[keep] = self.forward_program(call, keep)
            if self.gpu is not None and not torch.cuda.is_current_stream_capturing():
                self._expect_next(call, keep)
        return program

    def backward_of(
        self, saved: Sequence[Any], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program of a backward."""
        strides = None if dtotal is None else dtotal.stride()
        key = (needs, None if dy is None else dy.stride(), strides)
        program = self._programs.get(key)
        if program is None:
            given = self._by_slot((*saved, dy, dtotal))
            program = self._programs[key] = self.backward_program(given, needs)
        return program

    def recompute_of(self, saved: Sequence[Any]) -> Program:
        """The program of `recomputed`."""
        program = self._programs.get("recompute")
        if program is None:
            program = self._programs["recompute"] = self.recompute_program(
                self._by_slot(saved)
            )
        return program

    def _by_slot(self, given: Sequence[Any]) -> dict[str, Tensor]:
        pairs = zip(self._given_slots, given, strict=False)
        return {SLOTS[slot]: t for slot, t in pairs if t is not None}

    def _expect_next(self, t: Tensors, keep: bool) -> None:
        """Have worker processes compile what follows the first kernel, which this process compiles.

        First comes the rest of the call, and then the calls that are likely to follow.
        """
        from normplug._kernels import ahead

        forward, backward = self.jobs(t, keep)
        jobs = [*forward[1:], *backward]
        begun = [ahead.expect(job) for job in jobs]
        # If these are all compiled already, the others probably are, too.
        if any(begun) or not jobs:
            for job in guess.jobs_after(self, t, keep):
                ahead.expect(job)

    def jobs(self, t: Tensors, keep: bool) -> tuple[list[ahead.Job], list[ahead.Job]]:
        """The kernels of a forward, and of its backward if it computes all gradients.

        The backward's dy has the strides of y, or of an input with its rows in another order, as
        after an attention. The total often has no gradient. keep: see `forward_program`.
        """
        program = self._programs.get(keep) or self.forward_program(t, keep)
        forward, backward = program.jobs(self.acc), list["ahead.Job"]()
        needs = tuple(a is not None and a.requires_grad for a in t[:_INPUTS])
        if not keep or not any(needs):
            return forward, backward
        slots: list[Any] = [*t, *BLANKS]
        for slot, shape, stride, dtype in program.empties:
            slots[slot] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        saved, y = [slots[slot] for slot in program.saved], slots[_Y]
        alike = [torch.empty_like(a, device="meta") for a in t[:2] if a is not None]
        strides = dict.fromkeys(a.stride() for a in (y, *alike) if a.shape == y.shape)
        for dy in (y.new_empty_strided(y.shape, stride) for stride in strides):
            for dtotal in (slots[_TOTAL], None) if self.has_total else (None,):
                backward += self.backward_of(saved, dy, dtotal, needs).jobs(self.acc)
        return forward, backward

    def run(self, t: Tensors) -> Any:
        """Run a call, and record it for autograd if gradients are enabled."""
        x, residual = t.x, t.residual
        if unwrap_if_dead(x) is not x or (
            residual is not None and unwrap_if_dead(residual) is not residual
        ):
            t = unwrapped(t)
        if not torch.is_grad_enabled():
            return self.forward(t, False)[0]
        return _apply(*t[:_INPUTS], (self, t, None))

    def run_with_state(self, t: Tensors) -> tuple[Any, Sequence[Any]]:
        """Run a call in Python; return the result, and the tensors that `state` names."""
        t = unwrapped(t)
        state: list[Any] = []
        return _apply(*t[:_INPUTS], (self, t, state)), state

    def forward(self, t: Tensors, keep: bool) -> tuple[Any, tuple[Any, ...]]:
        """The result, and the tensors to save if `keep`."""
        program = self._programs.get(keep) or self.forward_of(t, keep)
        slots = [*t, *BLANKS]
        program.run(slots, self)
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
        return self._computed(program, (*saved, dy, dtotal))

    def recomputed(self, saved: Sequence[Any]) -> Tensor:
        """Recompute the output y."""
        return self._computed(self.recompute_of(saved), saved)[0]

    def composed_backward(
        self,
        saved: Sequence[Any],
        dy: Tensor,
        dtotal: Tensor | None,
        needs: Sequence[bool],
    ) -> Gradients:
        """The gradients by PyTorch's kernels, so that autograd can differentiate them again."""
        t, spec, dy = self.composed(saved, dy)
        # Views: if x depends on the weight or the residual, their gradients leave that path out.
        views: Any = (None if a is None else a.view_as(a) for a in t)
        t = Tensors(*views)
        wanted = [
            need and a is not None for need, a in zip(needs, t[:_INPUTS], strict=True)
        ]
        asked: list[Any] = [a for a, want in zip(t, wanted, strict=False) if want]
        wide: Any = (None if a is None else a.to(self.acc) for a in t)
        with torch.autocast(dy.device.type, enabled=False):
            y = spec.by_torch(Tensors(*wide))
            dy = dy.to(self.acc)
            gradients = iter(
                torch.autograd.grad(y, asked, dy, create_graph=True) if asked else ()
            )
        return [next(gradients) if want else None for want in wanted]

    def workspace(self, scratch: tuple[int, int]) -> tuple[int, Workspace]:
        """The current stream, and a workspace on it of `scratch`: (counters, partial results)."""
        from normplug._kernels.launch import Workspace

        stream = 0 if self.gpu is None else current_raw_stream(self.gpu)
        if self.peers is not None:
            self.peers.take_turn(stream)
        if stream != 0 or self.gpu is None:
            return stream, Workspace(self.device, self.acc, *scratch)
        work = self._workspaces.get(scratch)
        if work is None:
            work = self._workspaces[scratch] = Workspace.get(
                self.device, self.acc, *scratch
            )
        return stream, work

    def _computed(self, program: Program, given: Sequence[Any]) -> list[Any]:
        """Run a program on saved tensors, dy and dtotal, and return its results."""
        slots: list[Any] = [None] * len(SLOTS)
        for slot, t in zip(self._given_slots, given, strict=False):
            slots[slot] = t
        program.run(slots, self)
        results = ((slots[slot], dtype) for slot, dtype in program.results)
        return [t if t is None or dtype is None else t.to(dtype) for t, dtype in results]


def unwrapped(t: Tensors) -> Tensors:
    """The call, without the wrappers that a finished torch.func transform left on its tensors."""
    residual = None if t.residual is None else unwrap_if_dead(t.residual)
    return t.reading(unwrap_if_dead(t.x), residual)


class _Norm(torch.autograd.Function):
    # Its arguments are the tensors that may have gradients, and (plan, all tensors, list or None).
    # Each tensor argument costs host time.
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        plan, t, state = arguments[-1]
        result, saved = plan.forward(t, state is not None or any(ctx.needs_input_grad))
        if state is not None:  # the caller wants it
            state.extend(saved[_INPUTS:])
        ctx.save_for_backward(*saved)
        ctx.plan = plan
        if plan.has_total:
            ctx.set_materialize_grads(False)
            if not any(ctx.needs_input_grad[:2]):
                ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        plan, saved, needs = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[:-1]
        backward = plan.composed_backward if torch.is_grad_enabled() else plan.backward
        return (*backward(saved, dy, dtotal, needs), None)


_apply = applier(_Norm)
