"""The process that compiles kernels for another one: see `ahead`, which runs this file.

It reads jobs from its standard input, and forks a worker for each, unless it reads before that the
other process does the job itself. It writes a line when a worker starts and another when it ends,
and stops at the end of its input, or with nothing left to do. It does without torch, which takes
longer to import than a kernel takes to compile.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

SHORT = 4  # bytes that say which job is not to be done any more; a job has more
_IDLE = 60.0  # seconds without a job after which it ends
_POLL = 0.01  # seconds between two looks at the workers


def main(most: int) -> None:
    """Carry out jobs, `most` at a time, in their order."""
    waiting: dict[int, bytes] = {}
    workers: dict[int, int] = {}  # the job of each
    data, given, open_ = b"", 0, True
    try:
        while open_:
            while workers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _say("failed" if ended[1] else "done", workers.pop(ended[0]))
            while waiting and len(workers) < most:
                number = next(iter(waiting))
                _say("started", number)
                workers[_worker(waiting.pop(number))] = number
            if select.select([0], [], [], _POLL if workers else _IDLE)[0]:
                more = os.read(0, 1 << 16)
                open_, data = bool(more), data + more
                while len(data) >= (end := 4 + int.from_bytes(data[:4], "little")) > 4:
                    job, data = data[4:end], data[end:]
                    if len(job) == SHORT:
                        waiting.pop(int.from_bytes(job, "little"), None)
                    else:
                        waiting[given] = job
                        given += 1
            elif not workers:
                return
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def _worker(job: bytes) -> int:
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            task, arguments = pickle.loads(job)
            _TASKS[task](*arguments)
            code = 0
        finally:
            os._exit(code)
    return worker


def compile_now(
    module: str, name: str, key: str, arguments: tuple[Any, ...], options: Any, on: Any
) -> str:
    """Compile a kernel into Triton's cache; return its key there.

    Args:
        module: where the kernel is defined.
        name: of the kernel.
        key: what the other process takes for the kernel's source in keys of the cache. In Triton
            before 3.9 it depends on which kernels a process has met before this one.
        arguments: signature, constants and attributes, as `triton.compiler.ASTSource` takes them.
        options: the compiler's.
        on: backend, architecture and warp size of the GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module(module), name)
    kernel.hash = key
    source = triton.compiler.ASTSource(kernel, *arguments)
    return triton.compile(source, target=GPUTarget(*on), options=options).hash


def build_launcher(module: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Build the launcher of kernels of one signature, if Triton compiles launchers from C.

    Triton keeps it in its cache, too. Version 3.6 compiles it at the first launch, in half a
    second. Version 3.9 has one launcher for all signatures.

    Args:
        module: where the kernel is defined.
        name: the name of the kernel.
        arguments: as in `compile_now`.
    """
    import triton
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        kernel = getattr(importlib.import_module(module), name)
        driver.CudaLauncher(triton.compiler.ASTSource(kernel, *arguments), _Metadata())


class _Metadata:
    """A stand-in for the metadata of a compiled kernel, which a launcher does not depend on."""

    def __getattr__(self, name: str) -> None:
        return None


_TASKS: dict[str, Callable[..., Any]] = {"kernel": compile_now, "launcher": build_launcher}


def _say(what: str, number: int) -> None:
    os.write(1, f"{what} {number}\n".encode())


def _start(package: str, path: list[str], modules: list[str]) -> None:
    """Import the modules of the kernels, without what `normplug` itself imports."""
    sys.path[:] = path
    root = ModuleType("normplug")
    root.__path__ = [package]
    sys.modules["normplug"] = root
    for module in modules:
        importlib.import_module(module)
    # The names of kernels need a hash of all of Triton. It is computed here, once for all workers.
    from triton.runtime.cache import triton_key

    triton_key()


if __name__ == "__main__":
    most, *start = pickle.loads(bytes.fromhex(sys.argv[1]))
    _start(*start)
    main(most)
