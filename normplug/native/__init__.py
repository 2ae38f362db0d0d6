"""The host path in C++. `_kernels`, `_ops` and `modules` call it; others only read its `status`.

In Python, a norm call costs the host 25 us before its kernel runs, and a Python autograd function
as much again. `host_path.cpp` does the same work without Python. It runs the same programs, so the
results have the same bits. It is compiled in the background when a kernel is first needed, and the
compiled file is cached. Until it is ready, and where it cannot be compiled, calls run in Python.

The environment variable `NORMPLUG_NATIVE` is "auto" (the default), "0" to stay in Python, or "1"
to wait for the compiler at the first call and raise an error if it fails.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
        groups: how SyncBatchNorm joins the batches of each group of processes.
        kernels: how many kernels this process has launched, by origin: "here", compiled by the
            process itself; "workers", by its worker processes; "cache", found in Triton's cache.
    """

    way: str
    why: str
    library: Path | None
    groups: tuple[str, ...] = ()
    kernels: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        file = "" if self.library is None else f" ({self.library})"
        line = f"normplug: calls run through {self.way}: {self.why}{file}."
        line += "".join(f" SyncBatchNorm of {group}." for group in self.groups)
        if not any(self.kernels.values()):
            return line
        here, workers, cache = (self.kernels[name] for name in ("here", "workers", "cache"))
        return (
            f"{line} Kernels: {here} compiled by this process, {workers} by its workers, {cache} "
            "from Triton's cache."
        )


_NOT_STARTED = Status("Python", "no kernel has been needed yet", None)

_loaded: ModuleType | None = None
_paused = 0  # how many `python_way` contexts are open
_extension: ModuleType | None = None  # `_loaded`, or None while paused
_status = _NOT_STARTED
_started = False
_lock = threading.Lock()  # one thread starts
_kernels: Mapping[str, int] = MappingProxyType({})  # see `Status`
_groups: list[str] = []  # see `Status`
# From a Python plan to its C++ counterpart.
_plans: dict[Any, Any] = {}


def _unlock() -> None:
    """Replace the lock in a child process: a thread that holds it has no copy there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def status() -> Status:
    """Return whether calls run through C++ or Python, why, and where the kernels came from."""
    return _status._replace(kernels=dict(_kernels), groups=tuple(_groups))


def build() -> Path:
    """Compile the host path and wait for the compiler, unless a file that loads exists already.

    Returns:
        The compiled file. It has been loaded once, as a check.

    Raises:
        RuntimeError: it cannot be compiled; the message says why.
    """
    try:
        library = building.library()
        try:
            building.load(library)
        except (FileNotFoundError, NotADirectoryError, ImportError):
            building.compile_now(library)
            building.load(library)
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(f"normplug: the host path cannot be compiled: {error}") from error
    return library


@contextmanager
def python_way() -> Iterator[None]:
    """Within a `with` block, run the calls of all threads through Python, for comparison."""
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


def start() -> None:
    """Load the host path, or start compiling it. Called wherever a kernel may be needed."""
    global _started
    if _started:
        return
    with _lock:
        if not _started:
            _start()  # if it raises, the next call tries again
            _started = True


def _start() -> None:
    wanted = os.environ.get("NORMPLUG_NATIVE", "auto")
    if wanted not in ("0", "1", "auto"):
        raise ValueError(
            f"normplug: NORMPLUG_NATIVE must be 0, 1 or auto, not {wanted!r}. Set it to one of "
            "these, or unset it."
        )
    if wanted == "0":
        _set_status(Status("Python", "NORMPLUG_NATIVE is 0", None), logging.DEBUG)
    elif wanted == "1":
        _load(build())
    else:
        _start_in_background()


def _start_in_background() -> None:
    try:
        library = building.library()
        with suppress(FileNotFoundError, NotADirectoryError, building.Damaged):
            _load(library)
            return
        process = building.compile_in_background(library)
    except Exception as error:  # calls must go on, whatever has failed
        _set_status(_failed(error))
        return
    _set_status(Status("Python", "the host path in C++ is being compiled", None), logging.DEBUG)
    threading.Thread(target=_finish, args=(process, library), daemon=True).start()


def _finish(process: Popen[bytes], library: Path) -> None:
    try:
        building.finish(process, library)
        _load(library)
    except Exception as error:
        _set_status(_failed(error))


def _failed(error: Exception) -> Status:
    again = " (`python -m normplug.native build` compiles it again)"
    return Status("Python", f"{error}{again if isinstance(error, ImportError) else ''}", None)


def _load(library: Path) -> None:
    global _extension, _loaded
    _loaded = building.load(library)
    _extension = None if _paused else _loaded
    _set_status(Status("C++", "the host path is compiled", library), logging.DEBUG)


def _set_status(status: Status, level: int = logging.WARNING) -> None:
    global _status
    _log.log(level, "%s", status)
    _status = status  # last, so that the log line is there when others see the status


# --- What `_kernels`, `_ops` and `modules` call ---


def counts_in(kernels: Mapping[str, int]) -> None:
    """Set the mapping in which the kernels of this process are counted: see `Status`."""
    global _kernels
    _kernels = kernels


def say_group(text: str) -> None:
    """Add a group of processes to the status."""
    _groups.append(text)


def call(spec: Any, backend: Any, t: Any) -> Any:
    """Run a call if `keep` has stored its key, and return the result; None otherwise."""
    return None if _extension is None else _extension.call(spec, backend, t)


def keep(spec: Any, backend: Any, t: Any, ready: Any, bound: Any) -> None:
    """Store a call for `call` to run, if `bound` is the method `run` of a plan.

    ready: t, with copies of the tensors whose layout the kernels cannot read.
    """
    if _extension is not None and getattr(bound, "__name__", "") == "run":
        _extension.keep(spec, backend, t, ready, _plan_of(_extension, bound.__self__))


def forward(module: Any, *inputs: Any) -> Any:
    """Run a module call if `learn` has stored its key, and return the result; None otherwise.

    Args:
        module: its `_call_reads` names the statistics and attributes that a call depends on.
        *inputs: the input, residual and input bias, and any other values a call depends on.
    """
    if _extension is None:
        return None
    return _extension.forward(module, module._call_reads, *inputs)


def learn(module: Any, spec: Any, backend: Any, t: Any, *inputs: Any) -> None:
    """Store a module call for `forward` to run, if `keep` has stored the call that it makes.

    module and inputs are the arguments of `forward`; spec, backend and t describe the call.
    """
    reads = getattr(module, "_call_reads", None)  # None if another thread has unswapped the layer
    if _extension is not None and reads is not None:
        _extension.learn(spec, backend, t, module, reads, *inputs)


def run(plan: Any, t: Any) -> Any:
    """Run a call by its plan, and return its result; None where calls run through Python."""
    return None if _extension is None else _extension.run(_plan_of(_extension, plan), t)


def forget() -> None:
    """Drop all stored calls and plans, since the full Python cache has dropped its own."""
    _plans.clear()
    if _extension is not None:
        _extension.forget()


def recomputable_node(y: Any) -> Any:
    """The autograd node of y, if it is a C++ node that can recompute y; else None."""
    return None if _extension is None else _extension.node(y)


def recompute(node: Any) -> Any:
    """Recompute the first result of a node that `recomputable_node` returned."""
    assert _extension is not None
    return _extension.recompute(node)


def _plan_of(extension: ModuleType, plan: Any) -> Any:
    known = _plans.get(plan)
    if known is None:
        known = _plans[plan] = extension.plan(plan)
    return known
