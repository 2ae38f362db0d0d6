"""Compile `host_path.cpp`: where the result is cached, by which compiler, and how it is loaded."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import torch

_log = logging.getLogger("normplug")
SOURCE = Path(__file__).with_name("host_path.cpp")
_NAME = "normplug_host_path"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
# "$@" is the compiler. The shell outlives this process, and renames only a complete file.
_SCRIPT = '"$@" && sync "$PART" && mv -f "$PART" "$TARGET" || { rm -f "$PART"; exit 1; }'


@cache
def library() -> Path:
    """The path of the compiled file, whether or not it exists yet."""
    if sys.platform != "linux":
        raise RuntimeError(f"the C++ launcher needs Linux; this is {sys.platform}")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = os.environ.get("NORMPLUG_CACHE_DIR") or Path(caches, "normplug")
    # SOABI names Python's version and the machine type.
    builder = (torch.__version__, sysconfig.get_config_var("SOABI"), *_FLAGS)
    digest = hashlib.sha256(repr(builder).encode())
    for path in sorted(SOURCE.parent.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    return Path(folder, f"{_NAME}-{digest.hexdigest()[:12]}.so")


def compile_to(target: Path) -> None:
    """Compile the host path to this path.

    The compiler writes to a temporary name, so several processes may compile at once. It runs in a
    session of its own, where Ctrl-C does not reach it.

    Raises:
        OSError: the folder cannot be made.
        RuntimeError: there is no compiler, or it fails.
    """
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{uuid4().hex}.part")
    variables = {"LC_ALL": "C", "PART": str(part), "TARGET": str(target)}
    # A pipe would close with this process, and the compiler's next warning would end it.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        shell = subprocess.run(
            ["sh", "-c", _SCRIPT, "sh", *command(part)],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            umask=0o022,
            start_new_session=True,
        )
        log.seek(0)
        output = log.read()
    if shell.returncode != 0:
        _log.debug("normplug: the compiler's output:\n%s", output)
        lines = output.splitlines() or ["it printed nothing"]
        reason = next((line for line in lines if "error" in line.lower()), lines[0])
        raise RuntimeError(f"the compiler failed: {reason.strip()}")


def load(path: Path) -> ModuleType:
    """Import the compiled file, from a folder in which no other user can replace it.

    Raises:
        OSError: there is none.
        ImportError: it cannot be loaded; it has been removed.
        RuntimeError: another user could have written it.
    """
    _check_owner(path.parent)
    _check_owner(path)
    try:
        return _import(path)
    except ImportError:
        path.unlink(missing_ok=True)
        raise


def _import(path: Path) -> ModuleType:
    loader = ExtensionFileLoader(_NAME, str(path))
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def command(output: Path) -> list[str]:
    """The command line of the compiler, `CXX` or `c++`, which writes the library to `output`."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if not shutil.which(compiler[0]):
        raise RuntimeError(f"no C++ compiler was found: {compiler[0]}; set CXX to one")
    root = Path(torch.__file__).parent
    return [
        *compiler,
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        str(SOURCE),
        "-o",
        str(output),
        f"-L{root / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
    ]


def _check_owner(path: Path) -> None:
    """Refuse what other users can write to, since loading a library runs its code."""
    status = path.stat()
    belongs_to_another = status.st_uid not in (os.getuid(), 0)
    if belongs_to_another or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"others can write to {path}; run `chmod go-w` on it if it is yours, or set "
            "NORMPLUG_CACHE_DIR"
        )
