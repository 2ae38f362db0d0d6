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
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

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
        here, workers, cache = (
            self.kernels[name] for name in ("here", "workers", "cache")
        )
        return (
            f"{line} Kernels: {here} compiled by this process, {workers} by its workers, {cache} "
            "from Triton's cache."
        )


_NOT_STARTED = Status("Python", "no kernel has been needed yet", None)

kernels: Mapping[str, int] = {}  # see `Status`; `_kernels.ahead` assigns it
groups: list[str] = []  # see `Status`
operators: list[str] = []  # the norms that have operators

_loaded: ModuleType | None = None
_paused = 0  # how many `python_way` contexts are open
_extension: ModuleType | None = None  # `_loaded`, or None while paused
_status = _NOT_STARTED
_started = False
_starting = threading.Lock()


def _nothing(*arguments: Any) -> Any:
    """Stand in for a C++ function while calls run through Python."""


# The functions of `host_path.cpp`, which explains them. `_kernels`, `_ops` and `modules` call them.
_FUNCTIONS = (
    *("call", "keep", "forward", "learn", "keep_operator", "forget"),
    *("recomputable_node", "recompute"),
)
call = keep = forward = learn = keep_operator = forget = _nothing
recomputable_node = recompute = _nothing


def _use(extension: ModuleType | None) -> None:
    """Run calls through C++, or through Python if `extension` is None."""
    global _extension
    _extension = extension
    for (
        name
    ) in _FUNCTIONS:  # a call in another thread finds the old function or the new one
        globals()[name] = getattr(extension, name, _nothing)
    if _loaded is not None:
        _loaded.enable(extension is not None)


def status() -> Status:
    """Return whether calls run through C++ or Python, why, and where the kernels came from."""
    found = _status
    if found is _NOT_STARTED and not torch.cuda.is_available():
        found = found._replace(
            why="no CUDA device: PyTorch's kernels run, no gain in speed to expect"
        )
    return found._replace(kernels=dict(kernels), groups=tuple(groups))


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
        except (ImportError, OSError):
            building.finish(building.start_compiler(library), library)
            building.load(library)
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"normplug: the host path cannot be compiled: {error}"
        ) from error
    return library


@contextmanager
def python_way() -> Iterator[None]:
    """Within a `with` block, run the calls of all threads through Python, for comparison."""
    global _paused
    _paused += 1
    _use(None)
    try:
        yield
    finally:
        _paused -= 1
        _use(None if _paused else _loaded)


def start() -> None:
    """Load the host path, or start compiling it. Called wherever a kernel may be needed."""
    global _started
    # While one thread starts, the calls of others run in Python.
    if _started or not _starting.acquire(blocking=False):
        return
    try:
        _start()  # if it raises, the next call tries again
        _started = True
    finally:
        _starting.release()


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
        try:
            _load_or_compile(building.library())
        except Exception as error:  # calls must go on, whatever has failed
            _set_status(Status("Python", str(error), None))


def _load_or_compile(library: Path) -> None:
    try:
        _load(library)
    except (ImportError, OSError):
        process = building.start_compiler(library, again=False)
        why = "the host path in C++ is being compiled"
        _set_status(Status("Python", why, None), logging.DEBUG)
        threading.Thread(target=_finish, args=(process, library), daemon=True).start()


def _finish(process: Popen[bytes], library: Path) -> None:
    try:
        building.finish(process, library)
        _load(library)
    except Exception as error:
        _set_status(Status("Python", str(error), None))


def _load(library: Path) -> None:
    global _loaded
    _loaded = building.load(library)
    for name in operators:
        _loaded.implement(name)
    _use(None if _paused else _loaded)
    _set_status(Status("C++", "the host path is compiled", library), logging.DEBUG)


def _set_status(status: Status, level: int = logging.WARNING) -> None:
    global _status
    _log.log(level, "%s", status)
    _status = status  # last, so that the log line is there when others see the status
