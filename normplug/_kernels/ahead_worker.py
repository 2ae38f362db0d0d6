"""The process that compiles a kernel for another process: see `ahead`, which runs this file.

It reads the pickled job from its standard input. It never imports torch, which takes longer to
import than a kernel takes to compile.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import traceback
from types import ModuleType
from typing import Any


def main() -> None:
    """Compile the kernel, or exit with an error."""
    package, sys.path[:] = pickle.load(sys.stdin.buffer)
    # An empty `normplug` with the same submodules; the real one would import torch.
    root = sys.modules["normplug"] = ModuleType("normplug")
    root.__path__ = [package]
    source = compile_now(*pickle.load(sys.stdin.buffer))
    try:
        build_launcher(source)
    except Exception:
        traceback.print_exc()


def compile_now(
    module: str, name: str, key: str, arguments: tuple[Any, ...], options: Any, on: Any
) -> Any:
    """Compile the kernel `module.name` into Triton's cache; return its `ASTSource`.

    key: the hash of the kernel's source in the other process, which goes into cache keys. Before
    Triton 3.9 it depends on which kernels a process has hashed before it. arguments: signature,
    constants and attributes. options: the compiler's. on: backend, architecture and warp size.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module(module), name)
    kernel.hash = key
    source = triton.compiler.ASTSource(kernel, *arguments)
    triton.compile(source, target=GPUTarget(*on), options=options)
    return source


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
    main()
