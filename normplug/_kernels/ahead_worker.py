"""The process that forks workers to compile kernels for another process: see `ahead`.

Its standard input is a socket, from which it receives the socket of each worker. A worker reads a
pickled job from its socket and answers `DONE`. The process never imports torch, which takes longer
to import than a kernel takes to compile.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

DONE = b"1"


def main(package: str, *path: str) -> None:
    """Fork workers until the other process closes its socket."""
    sys.path[:] = path
    # An empty `normplug` with the same submodules; the real one would import torch.
    root = sys.modules["normplug"] = ModuleType("normplug")
    root.__path__ = [package]
    importlib.import_module("triton.compiler.code_generator")  # here, not in each worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    with socket.socket(fileno=0) as server:
        while descriptors := socket.recv_fds(server, 1, 1)[1]:
            worker = socket.socket(fileno=descriptors[0])
            if os.fork() == 0:
                run(worker)
            worker.close()


def run(answers: socket.socket) -> None:
    """Compile the kernel that is asked for, and exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Triton waits for ptxas
    try:
        with answers.makefile("rb") as jobs:
            compile_now(*pickle.load(jobs))
        answers.sendall(DONE)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def compile_now(
    name: str,
    keys: tuple[str, str],
    arguments: Any,
    options: Any,
    on: Any,
    launcher: bool,
) -> None:
    """Compile the kernel of this name into Triton's cache, and its launcher if asked to.

    keys: two hashes from the other process, which are parts of cache keys. The hash of Triton takes
    up to a second to compute. The hash of the kernel's source depends, before Triton 3.9, on which
    kernels the process has hashed earlier. arguments: signature, constants and attributes.
    options: the compiler's. on: backend, architecture and warp size.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(module), function)
    triton_key, kernel.hash = keys
    triton.runtime.cache.triton_key = lambda: triton_key
    source = triton.compiler.ASTSource(kernel, *arguments)
    building = threading.Thread(target=build_launcher, args=(source,))
    if launcher:
        building.start()  # its C compiler is another process
    triton.compile(source, target=GPUTarget(*on), options=options)
    if launcher:
        building.join()


def build_launcher(source: Any) -> None:
    """Build the launcher for a kernel's signature, if Triton compiles launchers from C.

    Triton caches the launcher, too. Version 3.6 compiles it at the first launch, in half a second.
    Version 3.9 has one launcher for all signatures.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(source, _Metadata())


class _Metadata:
    """A placeholder for a compiled kernel's metadata, on which a launcher does not depend."""

    cluster_dims = (1, 1, 1)  # Triton before 3.6 multiplies them

    def __getattr__(self, name: str) -> None:
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
