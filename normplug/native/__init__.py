"""The host path in C++: `path` runs the calls that it has stored, if it is compiled.

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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from normplug.native import building

__all__ = ["build", "python_way"]

_log = logging.getLogger("normplug")


class HostPath(NamedTuple):
    """Whether calls run through "C++" or "Python", why, and the compiled file, if it is loaded."""

    way: str
    why: str
    library: Path | None = None

    def __str__(self) -> str:
        file = f" ({self.library})" if self.library else ""
        return f"normplug: calls run through {self.way}: {self.why}{file}."


class _Python:
    """The functions of `host_path.cpp`, which explains them, while calls run through Python."""

    @staticmethod
    def _nothing(*arguments: Any) -> None:
        """No call is stored."""

    run_call = store_call = run_module = store_module = store_operator = _nothing
    clear = recomputable_node = recompute = convolve = _nothing


PYTHON: Any = _Python()
# The loaded host path, or PYTHON. Callers read it again for each call.
path: Any = PYTHON

_NOT_STARTED = HostPath("Python", "no kernel has been needed yet")
_state = _NOT_STARTED
_loaded: ModuleType | None = None
_paused = 0  # how many `python_way` contexts are open
_operators: list[str] = []  # the norms that have operators
_started = False
_starting = threading.Lock()


def host_path() -> HostPath:
    """Whether calls run through C++ or Python, and why."""
    if _state is _NOT_STARTED and not torch.cuda.is_available():
        why = "no CUDA device, so PyTorch's kernels run and nothing gets faster"
        return HostPath("Python", why)
    return _state


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
            building.compile_to(library)
            building.load(library)
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"normplug: the C++ launcher cannot be compiled: {error}"
        ) from error
    return library


@contextmanager
def python_way() -> Iterator[None]:
    """Within a `with` block, run the calls of all threads through Python, for comparison."""
    global _paused
    _paused += 1
    _choose_path()
    try:
        yield
    finally:
        _paused -= 1
        _choose_path()


def _choose_path() -> None:
    """Bind `path`: a call in another thread reads the old one or the new one."""
    global path
    is_compiled = _loaded is not None and _paused == 0
    path = _loaded if is_compiled else PYTHON
    if _loaded is not None:
        _loaded.enable(is_compiled)


def implement(norm: str) -> None:
    """Run the operators of a norm through C++, if it is loaded later."""
    _operators.append(norm)


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
        _set_state(HostPath("Python", "NORMPLUG_NATIVE is 0"), logging.DEBUG)
    elif wanted == "1":
        _load(build())
    else:
        try:
            _load_or_compile(building.library())
        except Exception as error:  # calls must go on, whatever has failed
            _set_state(HostPath("Python", str(error)))


def _load_or_compile(library: Path) -> None:
    try:
        _load(library)
    except (ImportError, OSError):
        why = "the C++ launcher is being compiled"
        _set_state(HostPath("Python", why), logging.DEBUG)
        threading.Thread(target=_compile, args=(library,), daemon=True).start()


def _compile(library: Path) -> None:
    try:
        building.compile_to(library)
        _load(library)
    except Exception as error:
        _set_state(HostPath("Python", str(error)))


def _load(library: Path) -> None:
    global _loaded
    _loaded = building.load(library)
    for norm in _operators:
        _loaded.implement(norm)
    _choose_path()
    _set_state(HostPath("C++", "the C++ launcher is compiled", library), logging.DEBUG)


def _set_state(state: HostPath, level: int = logging.WARNING) -> None:
    global _state
    _log.log(level, "%s", state)
    _state = state  # last, so that the log line is there when others see the state


def __getattr__(name: str) -> Any:
    """Return `status` or its result's type, `Status`, under their names of version 0.3."""
    if name not in ("status", "Status"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"normplug.native.{name} is deprecated: use normplug.status().",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module("normplug._status"), name)
