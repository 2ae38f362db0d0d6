"""The path of every norm call: look it up, check it, choose how to run it, run it, store that.

The choice is logged at level DEBUG. `_stored` is the only cache in Python. Calls with equal keys
share their checks, the function that runs them, and their plan. The host path in C++ has its own
cache, which is looked up first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normplug import _checks, native
from normplug._ops import can_run, subclasses
from normplug._ops.spec import Tensors
from normplug._torch import interposed

_log = logging.getLogger("normplug")
_MOST = 8192  # entries
_stored: dict[tuple[Hashable, ...], Any] = {}


class Way(NamedTuple):
    """How a call runs."""

    run: Callable[[Tensors], Any]
    t: Tensors  # with copies where `run` cannot read a layout
    why: str | None = None  # why PyTorch's kernels run it
    plan: Any = None  # of normplug's kernels


def call(caller: str, t: Tensors, spec: Any, backend: Any) -> Any:
    """Run a call, without the checks if its key is stored. It returns y, or (y, total).

    caller: the function's name, for errors. spec: see `normplug._ops.spec`.
    """
    key: tuple[Any, ...] = ()
    if not torch.compiler.is_compiling():
        found = native.path.run_call(spec, backend, t)
        if found is not None:
            return found
        if not interposed():
            key = key_of(t, spec, backend)
            try:
                found = _stored.get(key)
            except TypeError:  # an unhashable setting, which the checks will refuse
                found = None
            if found is not None:
                run, laid_out = found
                ready = t if laid_out is None else laid_out(t)
                if native.path is not native.PYTHON:
                    return _stored_in_cpp(run, t, ready, spec, backend)
                return run(ready)
    return _new_call(caller, t, spec, backend, key)


def _new_call(
    caller: str, t: Tensors, spec: Any, backend: Any, key: tuple[Any, ...]
) -> Any:
    """Check a call, choose how to run it, run it, and store the choice."""
    spec.check(caller, t)

    def again(t: Tensors) -> Any:
        return call(caller, t, spec, backend)

    if type(t.x) is not Tensor and subclasses.is_sharded(t.x):
        return subclasses.run_sharded(caller, t, spec.free_dims(t), again)
    if t.x.is_nested and subclasses.is_nested(t.x):
        return subclasses.run_nested(t, spec.normalized_shape, again)
    way = choose(caller, t, spec, backend, key)
    _checks.devices(caller, *t)
    in_cpp = key and native.path is not native.PYTHON
    result = (
        _stored_in_cpp(way.run, t, way.t, spec, backend) if in_cpp else way.run(way.t)
    )
    if key:
        _store(key, (way.run, None if way.t is t else way.plan.spec.laid_out))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "normplug.%s of %s: %s", caller, tuple(t.x.shape), _description(way, t)
            )
    return result


def _stored_in_cpp(run: Any, t: Tensors, ready: Tensors, spec: Any, backend: Any) -> Any:
    """Have C++ store a call and run it; if it cannot, run it in Python. ready: what `run` takes."""
    found = native.path.store_call(spec, backend, t, ready, run)
    return run(ready) if found is None else found


def choose(
    caller: str, t: Tensors, spec: Any, backend: Any, key: tuple[Any, ...] = ()
) -> Way:
    """Choose how a checked call runs. key: of the call, if it is known."""
    backend = _checks.backend(caller, backend)
    if backend == "torch":
        return Way(spec.by_torch, t, "backend is 'torch'")
    if not can_run.is_asked_for(backend, t.x):
        return Way(spec.by_torch, t, f"the input is on {t.x.device}")
    why = can_run.refusal_now() or spec.refusal(t)
    if why is not None:
        way = spec.without_kernels(t, why, lambda spec: choose(caller, t, spec, backend))
        if way is not None:
            return way
        if backend == "triton":
            raise NotImplementedError(
                f"normplug.{caller}: backend='triton', but {why}. Use backend='auto' or 'torch'."
            )
        return Way(spec.by_torch, t, why)
    if can_run.is_compiling():
        run = spec.operator if backend == "triton" else spec.compiled(t)
        if run is not None:
            return Way(run, t)
        return Way(spec.by_torch, t, "a compiler fuses PyTorch's operations")
    plan, ready = plan_of(t, spec, key)
    return Way(plan.run, ready, None, plan)


def plan_of(t: Tensors, spec: Any, key: tuple[Any, ...] = ()) -> tuple[Any, Tensors]:
    """The plan of a call, and its tensors in the layouts that the plan reads. key: see `choose`."""
    native.start()
    ready = spec.laid_out(t)
    key = key if key and ready is t else key_of(ready, spec, None)
    return made_once(key[1:], spec.plan, ready), ready  # all backends share the plan


def key_of(t: Tensors, spec: Hashable, backend: Hashable) -> tuple[Any, ...]:
    """The key of a call: all that decides whether it is valid, and how it runs.

    () if an argument has no shape: a nested tensor, or not a tensor, which the checks refuse.
    """
    key = [backend, spec]
    try:
        for a in t:  # no comprehension: before Python 3.12, it is a call
            if a is None:
                key.append(None)
            else:
                key.append((a.shape, a.stride(), a.dtype, a.device, type(a), a.is_neg()))
    except (AttributeError, RuntimeError):
        return ()
    return tuple(key)


def made_once(key: tuple[Any, ...], make: Callable[..., Any], *arguments: Any) -> Any:
    """The value of this key, made by `make(*arguments)` when the key is first seen."""
    value = _stored.get(key)
    if value is None:
        value = make(*arguments)
        _store(key, value)
    return value


def kinds_of_calls() -> Counter[str]:
    """How many kinds of calls, by shape and setting, run in normplug's kernels and in PyTorch's."""
    ways = [value[0] for value in _stored.values() if isinstance(value, tuple)]
    plans = [hasattr(getattr(run, "__self__", None), "jobs") for run in ways]
    return Counter("in kernels" if planned else "in PyTorch" for planned in plans)


def _store(key: tuple[Any, ...], value: Any) -> None:
    if len(_stored) >= _MOST:
        _stored.clear()
        native.path.clear()
    _stored[key] = value


def _description(way: Way, t: Tensors) -> str:
    """Which kernels run a call, and why, or from where they are launched."""
    if way.plan is None:
        return f"PyTorch's kernels, because {way.why}"
    jobs, _ = way.plan.jobs(way.t, torch.is_grad_enabled())
    kernels = ", ".join(
        f"{job.kernel.__name__} with num_warps={job.options['num_warps']}" for job in jobs
    )
    copied = "" if way.t is t else "copies to a layout that the kernels read, "
    path = native.host_path()
    host = "C++" if path.way == "C++" else f"Python, because {path.why}"
    return f"{type(way.plan).__name__}, {copied}{kernels}, launched by {host}"
