"""The server process that compiles kernels for another process: see `ahead`, which runs this file.

It reads jobs from its standard input and forks a worker for each, unless the job is withdrawn
before it starts. It writes one line when a worker starts and another when it ends. It exits at the
end of its input, or once it is idle. It never imports torch, which takes longer to import than a
kernel takes to compile.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

SHORT = 4  # bytes of a message that withdraws a job: the job's number; jobs are longer
_IDLE = 60.0  # seconds without a job after which the server exits
_POLL = 0.01  # seconds between two checks of the workers


def main(most: int) -> None:
    """Run jobs in order, `most` at a time."""
    waiting: dict[int, bytes] = {}  # job number -> job
    workers: dict[int, int] = {}  # process id -> job number
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
                # A message is its length in 4 bytes, and a pickled job or a number to withdraw.
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
            os.dup2(2, 1)  # Triton prints PTX that ptxas rejects; only answers may go to stdout
            task, arguments = pickle.loads(job)
            _TASKS[task](*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return worker


def compile_now(
    module: str, name: str, key: str, arguments: tuple[Any, ...], options: Any, on: Any
) -> str:
    """Compile a kernel into Triton's cache; return its key there.

    Args:
        module: The module that defines the kernel.
        name: The kernel's name.
        key: The hash of the kernel's source in the other process, which goes into cache keys.
            Before Triton 3.9 it depends on which kernels a process has met before this one.
        arguments: Signature, constants and attributes, as `triton.compiler.ASTSource` takes them.
        options: The compiler's options.
        on: Backend, architecture and warp size of the GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module(module), name)
    kernel.hash = key
    source = triton.compiler.ASTSource(kernel, *arguments)
    return triton.compile(source, target=GPUTarget(*on), options=options).hash


def build_launcher(module: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Build the launcher for kernels of one signature, if Triton compiles launchers from C.

    Triton caches the launcher, too. Version 3.6 compiles it at the first launch, in half a second.
    Version 3.9 has one launcher for all signatures.

    Args:
        module: The module that defines the kernel.
        name: The kernel's name.
        arguments: As in `compile_now`.
    """
    import triton
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        kernel = getattr(importlib.import_module(module), name)
        driver.CudaLauncher(triton.compiler.ASTSource(kernel, *arguments), _Metadata())


class _Metadata:
    """A placeholder for a compiled kernel's metadata, on which a launcher does not depend."""

    cluster_dims = (1, 1, 1)  # Triton before 3.6 multiplies them

    def __getattr__(self, name: str) -> None:
        return None


_TASKS: dict[str, Callable[..., Any]] = {"kernel": compile_now, "launcher": build_launcher}


def _say(what: str, number: int) -> None:
    os.write(1, f"{what} {number}\n".encode())


def _start(package: str, path: list[str], modules: list[str]) -> None:
    """Import the kernels' modules under an empty `normplug`; the real one would import torch."""
    sys.path[:] = path
    root = ModuleType("normplug")
    root.__path__ = [package]
    sys.modules["normplug"] = root
    for module in modules:
        importlib.import_module(module)
    # Cache keys include a hash of all of Triton. It is computed here, once for all workers.
    from triton.runtime.cache import triton_key

    triton_key()


if __name__ == "__main__":
    most, *start = pickle.loads(bytes.fromhex(sys.argv[1]))
    _start(*start)
    main(most)
