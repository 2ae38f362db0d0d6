"""The C++ host path, built before any timing: calls do not wait for a build."""

from __future__ import annotations

import subprocess
import sys

from normplug import native
from normplug.native import python_way

__all__ = ["build", "python_way", "status"]


def build() -> None:
    """Build the C++ host path; if that fails, print that calls run through Python."""
    if subprocess.run([sys.executable, "-m", "normplug.native", "build"]).returncode:
        message = "normplug.bench: the host path in C++ was not built; calls run through Python"
        print(message, file=sys.stderr, flush=True)


def status() -> str:
    """The path that calls take: "C++" or "Python"."""
    return native.status().way
