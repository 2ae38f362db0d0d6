"""The host path in C++; `_ops` and `functional` call it, and all else may ask for its `status`.

A call of a norm costs the host 25 us in Python before its kernel runs, and an autograd function in
Python as much again. `host_path.cpp` does the same without Python, by the same programs, so the
results have the same bits. It is compiled in the background when a kernel is first needed, and the
file is kept. Until then, and wherever it cannot be compiled, calls run through Python.

The environment variable `NORMPLUG_NATIVE` is "auto" (the default), "0" for Python, or "1" to wait
for the compiler at the first call, and to raise an error if it fails.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from normplug.native import building

__all__ = ["Status", "build", "python_way", "status"]

_log = logging.getLogger("normplug")


class Status(NamedTuple):
    """Whether calls run through C++ or Python, and why.

    Attributes:
        way: "C++" or "Python".
        why: the reason, in one sentence.
        library: the compiled file, or None.
        kernels: how many kernels this process has launched, by where they came from: "here",
            compiled by the process itself; "workers", by its workers; "cache", found compiled.
    """

    way: str
    why: str
    library: Path | None
    kernels: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        file = "" if self.library is None else f" ({self.library})"
        line = f"normplug: calls run through {self.way}: {self.why}{file}."
        if not any(self.kernels.values()):
            return line
        here, workers, cache = (self.kernels[name] for name in ("here", "workers", "cache"))
        return (
            f"{line} Kernels: {here} compiled by this process, {workers} by its workers, {cache} "
            "found compiled."
        )


_NOT_WANTED = Status("Python", "no kernel has been needed yet", None)
_OFF = Status("Python", "NORMPLUG_NATIVE is 0", None)

_loaded: ModuleType | None = None
_paused = 0  # how many `python_way` contexts are open
_extension: ModuleType | None = None  # what is loaded, unless it is paused
_status = _NOT_WANTED
_started = False
_callbacks_lock = threading.Lock()
_callbacks: list[Callable[[], None]] = []  # what waits for the C++ way to be loaded
_lock = threading.Lock()
_kernels: Mapping[str, int] = MappingProxyType({})  # see `Status`
# The C++ plan of each Python plan.
_plans: dict[Any, Any] = {}


def status() -> Status:
    """Whether calls now run through C++ or Python, and why; and where the kernels came from."""
    return _status._replace(kernels=dict(_kernels))


def build() -> Path:
    """Compile the host path now, unless that has been done, and wait for it.

    Returns:
        The compiled file, which can be loaded.

    Raises:
        RuntimeError: it cannot be compiled, and why.
    """
    try:
        library = building.library()
        if not _is_sound(library):
            building.compile_now(library)
            building.load(library)
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(f"normplug: the host path cannot be compiled: {error}") from error
    return library


@contextmanager
def python_way() -> Iterator[None]:
    """Run the calls of all threads through Python inside a `with` block, to compare the two."""
    global _extension, _paused
    _pause(1)
    try:
        yield
    finally:
        _pause(-1)


def _pause(change: int) -> None:
    global _extension, _paused
    _paused += change
    _extension = None if _paused else _loaded
    if _loaded is not None:
        _loaded.pause(_paused > 0)


def start() -> None:
    """Load the host path, or have it compiled; called wherever a kernel is wanted."""
    global _started
    if _started:
        return
    with _lock:
        if not _started:
            _start()  # raises again at the next call what it raises now
            _started = True


def _start() -> None:
    wanted = os.environ.get("NORMPLUG_NATIVE", "auto")
    if wanted not in ("0", "1", "auto"):
        raise ValueError(
            f"normplug: NORMPLUG_NATIVE must be 0, 1 or auto, not {wanted!r}. Set it to one of "
            "these, or unset it."
        )
    if wanted == "0":
        _say(_OFF, logging.DEBUG)
    elif wanted == "1":
        _load(build())
    else:
        _start_in_background()


def _start_in_background() -> None:
    try:
        library = building.library()
        if library.exists():
            _load(library)
            return
        process = building.compile_in_background(library)
    except Exception as error:  # whatever it is, calls go on
        _say(_failed(error))
        return
    _say(Status("Python", "the host path in C++ is being compiled", None), logging.DEBUG)
    threading.Thread(target=_finish, args=(process, library), daemon=True).start()


def _finish(process: Popen[bytes], library: Path) -> None:
    try:
        building.finish(process, library)
        _load(library)
    except Exception as error:
        _say(_failed(error))


def _failed(error: Exception) -> Status:
    again = " (`python -m normplug.native build` compiles it again)"
    return Status("Python", f"{error}{again if isinstance(error, ImportError) else ''}", None)


def _is_sound(library: Path) -> bool:
    """Whether it can be loaded; else it is removed, such as half a file."""
    try:
        building.load(library)
    except ImportError:
        library.unlink()
        return False
    except FileNotFoundError:
        return False
    return True


def _load(library: Path) -> None:
    global _extension, _loaded
    with _callbacks_lock:
        _loaded = building.load(library)
        _extension = None if _paused else _loaded
        while _callbacks:
            _callbacks.pop(0)()
    _say(Status("C++", "the host path is compiled", library), logging.DEBUG)


def _say(now: Status, level: int = logging.WARNING) -> None:
    global _status
    _log.log(level, "%s", now)
    _status = now  # last: who sees it may rely on the log line


# --- What `_kernels`, `_ops` and `functional` call ---


def counts_in(kernels: Mapping[str, int]) -> None:
    """Say where the kernels of this process are counted: see `Status`."""
    global _kernels
    _kernels = kernels


def call(spec: Any, backend: Any, t: Any) -> Any:
    """The result of a call that `keep` has made known; else None."""
    return None if _extension is None else _extension.call(spec, backend, t)


def keep(spec: Any, backend: Any, t: Any, bound: Any) -> None:
    """Let `call` carry out calls like this one, if what is bound to them is a plan's `run`."""
    plan = getattr(bound, "__self__", None)
    if _extension is not None and plan is not None:
        _extension.keep(spec, backend, t, _plan_of(_extension, plan))


def forward(module: Any, *inputs: Any) -> Any:
    """The result of a module's call that `learn` has made known; else None.

    Args:
        module: it declares `_call_reads`, the names of its attributes that a call depends on.
        *inputs: its input, residual and input bias, and what else a call depends on.
    """
    if _extension is None:
        return None
    return _extension.forward(module, module._call_reads, *inputs)


def learn(module: Any, spec: Any, backend: Any, t: Any, *inputs: Any) -> None:
    """Let `forward` carry out calls of a module like this one, as `call` does.

    Args:
        module: as in `forward`.
        spec: as in `call`.
        backend: as in `call`.
        t: as in `call`.
        *inputs: as in `forward`.
    """
    if _extension is not None:
        _extension.learn(spec, backend, t, module, module._call_reads, *inputs)


def when_loaded(callback: Callable[[], None]) -> None:
    """Call a function once the C++ way is loaded, or now if it is."""
    with _callbacks_lock:
        if _loaded is None:
            _callbacks.append(callback)
        else:
            callback()


def implement(name: str, is_forward: bool, states: int) -> None:
    """Carry out an operator of `normplug._ops.library` in C++.

    Args:
        name: in the namespace "normplug"; NAME_python is Python's, which C++ calls for what it
            does not know.
        is_forward: whether it is the forward of a norm, or else its backward.
        states: how many tensors the forward finds out for the backward.
    """
    assert _loaded is not None
    _loaded.implement(name, f"normplug::{name}_python", is_forward, states)


def note(plan: Any) -> None:
    """Say by which plan Python carries out an operator, so that C++ does so next time."""
    if _extension is not None:
        _extension.note(_plan_of(_extension, plan))


def run(plan: Any, t: Any) -> Any:
    """The result of a call by its plan; None where calls run through Python."""
    return None if _extension is None else _extension.run(_plan_of(_extension, plan), t)


def forget() -> None:
    """Forget all calls and plans, as the cache of Python does."""
    _plans.clear()
    if _extension is not None:
        _extension.forget()


def recomputable_node(y: Any) -> Any:
    """The autograd node of y, if it is one of the C++ way that can recompute y; else None."""
    return None if _extension is None else _extension.node(y)


def recompute(node: Any) -> Any:
    """The result of a node that `recomputable_node` gave, again."""
    assert _extension is not None
    return _extension.recompute(node)


def plan_of(y: Any) -> Any:
    """The plan of y's autograd node, if that is one of the C++ way; else None."""
    return None if _extension is None or y.grad_fn is None else _extension.plan_of(y)


def _plan_of(extension: ModuleType, plan: Any) -> Any:
    known = _plans.get(plan)
    if known is None:
        known = _plans[plan] = extension.plan(plan)
    return known
