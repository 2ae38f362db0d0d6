"""`normplug.warm_up`: compile what a training step will need, in parallel, before the first step."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from normplug import _checks, native
from normplug._ops import eligible
from normplug._torch import fake_mode, shown_mode, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from normplug._kernels.ahead import Job


class WarmUp(NamedTuple):
    """What `normplug.warm_up` has done.

    Attributes:
        kernels: how many kernels it compiled. Those in Triton's cache do not count.
        seconds: how long it took.
        why: why nothing was compiled, or not all that a step will need; "" if all is compiled.
    """

    kernels: int
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        why = f" {self.why}." if self.why else ""
        return f"normplug: compiled {self.kernels} kernels in {self.seconds:.1f} s.{why}"


def warm_up(model: nn.Module, *batch: Any, **named: Any) -> WarmUp:
    """Compile the kernels that a training step of a swapped model needs, in parallel.

    Without it, they are compiled in the first step, where some of them have to be guessed. It runs
    the model's forward and backward on fake tensors, which have shapes but no values, and has
    worker processes compile the kernels into Triton's cache. No parameter, buffer, gradient or
    random state changes, and no GPU memory is used. Python code of the model and its hooks runs
    once. Call it in the mode (`model.train()`), the autocast and the memory format of the step.

    Args:
        model: the model, after `swap` and `fuse`, on its device.
        *batch: the positional arguments of its forward.
        **named: the keyword arguments of its forward.

    Returns:
        How many kernels it compiled, and how long that took. Without a GPU it does nothing, and
        `why` says so. If the model cannot run on fake tensors, because it reads values, `why` has
        the error; the kernels that were found until then are compiled, and the first step compiles
        the others.

    Raises:
        TypeError: `model` is not a module.

    Examples:
        >>> print(normplug.warm_up(model, x))
        normplug: compiled 0 kernels in 0.0 s. The input is on cpu, and the kernels need a CUDA
        device.
    """
    _checks.module("warm_up", model)
    start = time.perf_counter()
    tensors = chain(tree_leaves((batch, named)), model.parameters(), model.buffers())
    x = next((t for t in tensors if isinstance(t, Tensor)), None)
    why = "there is no tensor" if x is None else _refusal(x)
    if why is not None:
        return WarmUp(0, time.perf_counter() - start, why[0].upper() + why[1:])
    from normplug._kernels import ahead

    jobs, why = _record(model, batch, named)
    count = ahead.compile_now(list(jobs.values()))
    return WarmUp(count, time.perf_counter() - start, why)


def _refusal(x: Tensor) -> str | None:
    """Why there is nothing to compile, or no way to; None if there may be."""
    if (why := eligible.refusal_now() or eligible.refusal_of_device(x)) is not None:
        return why
    from normplug._kernels import ahead, launch

    if launch.INTERPRETED:
        return "Triton's interpreter compiles nothing"
    if not ahead.KEYED:
        return "worker processes need Linux and Triton 3.5"
    if ahead.most_workers() == 0:
        return "there are no worker processes: NORMPLUG_COMPILE_WORKERS or the number of cores"
    return None


class _Recorder:
    """Collects the kernels that programs would launch; see `Program.run`."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    def record(self, launch: Any, tensors: tuple[Tensor, ...]) -> None:
        job = launch.job([t.dtype for t in tensors])
        self.jobs.setdefault(job.key, job)


def _record(model: nn.Module, batch: Any, named: Any) -> tuple[dict[str, Job], str]:
    """The kernels of a step, in the order of use, and why there may be more; "" if there are not."""
    mode, recorder = fake_mode(), _Recorder()

    def fake(t: Tensor) -> Any:
        return mode.from_tensor(t)

    own = {name: fake(t) for name, t in chain(model.named_parameters(), model.named_buffers())}
    batch, named = tree_map_only(Tensor, fake, (batch, named))
    inputs = [t for t in chain(own.values(), tree_leaves((batch, named))) if _has_gradient(t)]
    try:
        with native.python_way(), mode, shown_mode(mode, recorder):
            y = torch.func.functional_call(model, own, batch, named)
            results = [t for t in tree_leaves(y) if _has_gradient(t)]
            if results and inputs:
                torch.autograd.grad(sum(t.sum() for t in results), inputs, allow_unused=True)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return (
            recorder.jobs,
            f"The model cannot run on fake tensors: {type(error).__name__}: {line}",
        )
    return recorder.jobs, ""


def _has_gradient(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad
