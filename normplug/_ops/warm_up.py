"""`normplug.warm_up`: compile what a training step will need before the first step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug import _checks, native
from normplug._ops import can_run
from normplug._torch import recording, tree_leaves, tree_map_only


class WarmUp(NamedTuple):
    """What `normplug.warm_up` has done.

    Attributes:
        kernels: how many kernels it compiled. Kernels that Triton's cache had do not count.
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
    worker processes compile the kernels into Triton's cache. No parameter, buffer, gradient,
    random state or attribute of a module changes, and no GPU memory is used. But Python code of
    the model and its hooks runs once: what it stores elsewhere, in a global cache for example, is
    fake. Call it in the mode (`model.train()`), the autocast and the memory format of the step,
    before `DistributedDataParallel` or FSDP wraps the model.

    Args:
        model: the model, after `swap` and `fuse`, on its device.
        *batch: the positional arguments of its forward; values do not matter.
        **named: the keyword arguments of its forward.

    Returns:
        A named tuple: how many `kernels` it compiled, the `seconds`, and `why` it could not compile
        all: without a GPU, or if the model waits for other processes, it does nothing. If the model
        cannot run on fake tensors, because it reads values or launches kernels of its own, `why`
        has the error, and only the kernels that were found until then are compiled.

    Raises:
        TypeError: `model` is not a module.

    Examples:
        >>> print(warm_up(nn.LayerNorm(8), torch.ones(2, 8)))
        normplug: compiled 0 kernels in ... s. The input is on cpu, and the kernels need a CUDA
        device.
    """
    _checks.module("warm_up", model)
    start = time.perf_counter()
    tensors = chain(tree_leaves((batch, named)), model.parameters(), model.buffers())
    x = next((t for t in tensors if isinstance(t, Tensor)), None)
    if (why := _refusal(x) or _refusal_of_model(model)) is not None:
        return WarmUp(0, time.perf_counter() - start, why[0].upper() + why[1:])
    from normplug._kernels import ahead

    ahead.start()
    jobs, why = _record(model, batch, named)
    count = ahead.wait(key for key, is_new in jobs.items() if is_new.result())
    return WarmUp(count, time.perf_counter() - start, why)


def _refusal(x: Tensor | None) -> str | None:
    """Why no kernel can be compiled for x, or none is needed; None otherwise."""
    if x is None:
        return "there is no tensor"
    if (why := can_run.refusal_now() or can_run.refusal_of_device(x)) is not None:
        return why
    from normplug._kernels import ahead, launch

    if launch.INTERPRETED:
        return "Triton's interpreter compiles nothing"
    if not ahead.KEYED:
        return "worker processes need Linux and Triton 3.5"
    if ahead.most_workers() == 0:
        return "there are no worker processes: NORMPLUG_COMPILE_WORKERS or the number of cores"
    return None


def _refusal_of_model(model: nn.Module) -> str | None:
    """Why a forward on fake tensors would reach other processes; None if it would not."""
    for t in chain(model.parameters(), model.buffers()):
        if type(t) not in (Tensor, nn.Parameter):
            return f"a parameter is a {type(t).__name__}: call warm_up before the model is wrapped"
    joining = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm)
    found = next(
        (type(m).__name__ for m in model.modules() if isinstance(m, joining)), None
    )
    if found and dist.is_available() and dist.is_initialized():
        return f"a {found} waits for other processes"
    return None


def _record(
    model: nn.Module, batch: Any, named: Any
) -> tuple[dict[str, Future[bool]], str]:
    """The kernels of a step, by key, and why there may be more, or "".

    A kernel's value is whether a worker compiles it: one begins while the model runs. A thread asks
    the workers, since the first kernel's key needs a hash of all of Triton.
    """
    from normplug._kernels import ahead

    jobs: dict[str, Future[bool]] = {}
    thread = ThreadPoolExecutor(1)

    def take(job: ahead.Job) -> None:
        if job.key not in jobs:
            jobs[job.key] = thread.submit(ahead.expect, job, certain=True)

    try:
        with thread, _restored(model), native.python_way(), recording(take) as mode:
            real = (
                dict(chain(model.named_parameters(), model.named_buffers())),
                batch,
                named,
            )
            own, batch, named = tree_map_only(Tensor, mode.from_tensor, real)
            y = torch.func.functional_call(model, own, batch, named)
            inputs, results = _differentiable((own, batch, named)), _differentiable(y)
            if results and inputs:
                gradients = [torch.empty_like(t) for t in results]
                torch.autograd.grad(results, inputs, gradients, allow_unused=True)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return (
            jobs,
            f"The model cannot run on fake tensors: {type(error).__name__}: {line}",
        )
    return jobs, ""


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Undo at the end what a forward stores in its modules and in their dictionaries."""
    own = [vars(module) for module in model.modules()]
    own += [
        each
        for attributes in own
        for each in attributes.values()
        if isinstance(each, dict)
    ]
    before = [(attributes, dict(attributes)) for attributes in own]
    try:
        yield
    finally:
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            for name, value in then.items():
                if now.get(name) is not value:  # a frozen dictionary takes no value
                    now[name] = value


def _differentiable(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]
