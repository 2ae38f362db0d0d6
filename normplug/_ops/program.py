"""Programs: a plan's work on its tensors as data, which Python and C++ run alike.

A program works on a list of slots, one for each name that a tensor can have; the last is always
None. It copies inputs whose layout the kernels cannot read, allocates outputs, launches kernels,
and names the slots of its results and of the tensors that the backward will need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from normplug._ops.spec import Tensors
from normplug._torch import jobs_of, recordings

if TYPE_CHECKING:
    from normplug._kernels import ahead
    from normplug._kernels.launch import Launch

SLOTS = (
    *Tensors._fields,
    "y", "total", "stats", "bits", "peaks", "places",
    "dy", "dtotal", "dx", "dresidual", "dweight", "dbias", "dinput_bias",
    "message", "partial", "counters", "nothing",
)  # fmt: skip
SLOT = {name: index for index, name in enumerate(SLOTS)}
RUNNING = ("running_mean", "running_var", "tracked")
TRACKED, PARTIAL, COUNTERS = SLOT["tracked"], SLOT["partial"], SLOT["counters"]

# Placeholders for absent tensors. The kernel needs a pointer of the right dtype, but never
# dereferences it. For names that are not listed, the launch's first tensor serves.
_PLACEHOLDERS = {
    **dict.fromkeys(("weight", "bias", "input_bias", "running_mean", "running_var"), "partial"),
    **dict.fromkeys(("dweight", "dbias", "dinput_bias", "stats"), "partial"),
    "tracked": "counters",
    "total": "y",
}


Layout = tuple[Sequence[int], Sequence[int], torch.dtype]  # sizes, strides, dtype


class Empty(NamedTuple):
    """A tensor to allocate; `like`: a slot whose tensor has the same sizes, strides and dtype."""

    slot: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    like: int | None


class Step(NamedTuple):
    """A launch, the slots of its tensors, and `pick`, which takes these tensors from all slots."""

    launch: Launch
    slots: tuple[int, ...]
    pick: Callable[[Sequence[Any]], tuple[Tensor, ...]]


class Result(NamedTuple):
    """A slot to return, cast to `dtype` if one is given."""

    slot: int
    dtype: torch.dtype | None = None


NOTHING = Result(SLOT["nothing"])


class Program:
    """Copies, allocations and launches for tensors of known sizes, strides and dtypes.

    Args:
        given: The tensors that the slots hold at the start, by slot.
        empties: Shape, strides and dtype of each tensor to allocate, by slot.
        launches: The launches, in order, each with a map from the kernel's argument to the slot
            for tensors whose slot has another name.
        results: The slots that are returned.
        saved: The slots that the backward will need, in the order of `Plan`.
        copies: Slots whose tensors are copied first, and the strides they must have.
        updates: The slots whose tensors the launches update in place.
        counts: Whether to increment `tracked` first.
        scratch: How many counters and how many partial results the launches need.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor],
        *,
        empties: Mapping[str, Layout],
        launches: Sequence[tuple[Launch, Mapping[str, str]]],
        results: Sequence[Result] = (),
        saved: Sequence[str] = (),
        copies: Mapping[str, Sequence[int]] | None = None,
        updates: Sequence[str] = (),
        counts: bool = False,
        scratch: tuple[int, int] = (0, 0),
    ) -> None:
        self.empties = tuple(_empty(given, name, *layout) for name, layout in empties.items())
        dtypes = {name: t.dtype for name, t in given.items()}
        dtypes |= {name: dtype for name, (_, _, dtype) in empties.items()}
        present = {*dtypes, "partial", "counters"}
        self.steps = tuple(_step(launch, present, renamed) for launch, renamed in launches)
        self._dtypes = {SLOT[name]: dtype for name, dtype in dtypes.items()}
        self.results = tuple(results)
        self.saved = tuple(SLOT[name] for name in saved)
        self.copies = tuple((SLOT[name], tuple(s)) for name, s in (copies or {}).items())
        self.updates = tuple(SLOT[name] for name in updates if name in given)
        self.counts, self.scratch = counts, scratch

    def run(self, slots: list[Any], device: torch.device, workspace: Callable[..., Any]) -> None:
        """Run the program, which fills the slots.

        Args:
            slots: as long as `SLOTS`.
            device: where to allocate.
            workspace: maps `scratch` to the current stream and a `Workspace` on it.
        """
        for slot, wanted in self.copies:
            t = slots[slot]
            copy = torch.empty_strided(t.shape, wanted, dtype=t.dtype, device=device)
            slots[slot] = copy.copy_(t)
        if self.counts and slots[TRACKED] is not None:
            slots[TRACKED].add_(1)
        for slot, shape, stride, dtype, like in self.empties:
            slots[slot] = (
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                if like is None
                else torch.empty_like(slots[like])
            )
        if self.steps:
            stream, work = workspace(self.scratch)
            slots[PARTIAL], slots[COUNTERS] = work.partial, work.counters
            if recordings and (jobs := jobs_of(work.partial)) is not None:
                for launch, _, pick in self.steps:
                    job = launch.job([t.dtype for t in pick(slots)])
                    jobs.setdefault(job.key, job)
                return
            for launch, _, pick in self.steps:
                launch(stream, *pick(slots))
        if self.updates:
            updated = map(slots.__getitem__, self.updates)
            increment_version(list(filterfalse(Tensor.is_inference, updated)))

    def jobs(self, accumulator: torch.dtype) -> list[ahead.Job]:
        """The jobs that compile the kernels; accumulator: the dtype of partial results."""
        dtypes = {PARTIAL: accumulator, COUNTERS: torch.int64, **self._dtypes}
        return [launch.job([dtypes[slot] for slot in slots]) for launch, slots, _ in self.steps]

    def results_of(self, slots: Sequence[Any]) -> list[Any]:
        """The results of a run, from its slots."""
        return [
            t if t is None or dtype is None else t.to(dtype)
            for t, dtype in ((slots[slot], dtype) for slot, dtype in self.results)
        ]


def named(t: Tensors) -> dict[str, Tensor]:
    """The tensors of a call that are not None, by slot."""
    return {name: each for name, each in t._asdict().items() if each is not None}


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _empty(
    given: Mapping[str, Tensor],
    name: str,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Empty:
    # `empty_like` takes the host half the time of `empty_strided`.
    layout = (tuple(shape), tuple(stride), dtype)
    alike = (n for n, t in given.items() if (tuple(t.shape), t.stride(), t.dtype) == layout)
    like = next(alike, None)
    return Empty(SLOT[name], *layout, None if like is None else SLOT[like])


def _step(launch: Launch, present: set[str], renamed: Mapping[str, str]) -> Step:
    slots = []
    for name in launch.pointers:
        source = renamed.get(name, name)
        if source not in present:
            source = _PLACEHOLDERS.get(name, launch.pointers[0])
        slots.append(SLOT[source])
    return Step(launch, tuple(slots), itemgetter(*slots))
