"""The host path in C++, where this normplug has one: it is built before a clock starts."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec

MODULE = "normplug.native"
ABSENT = "absent"


def exists() -> bool:
    """Whether this normplug has a host path in C++."""
    spec = find_spec(MODULE)
    return spec is not None and spec.origin is not None  # a folder without code has no origin


def build() -> None:
    """Build it now, as calls do not wait for a build; print that calls go without if it fails."""
    if exists() and subprocess.run([sys.executable, "-m", MODULE, "build"]).returncode:
        message = "normplug.bench: the C++ host path was not built; calls go the Python way"
        print(message, file=sys.stderr, flush=True)


def status() -> str:
    """Which way calls go, in the words of `normplug.native.status()`; or "absent"."""
    return str(import_module(MODULE).status()) if exists() else ABSENT


def python_way() -> AbstractContextManager[object]:
    """Inside, calls go the Python way, although C++ could take them."""
    return import_module(MODULE).python_way()
