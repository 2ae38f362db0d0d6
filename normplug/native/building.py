"""Compiling `host_path.cpp`: where the result lies, with which compiler, and in which process."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import torch

SOURCE = Path(__file__).with_name("host_path.cpp")
_NAME = "normplug_host_path"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_STALE = 24 * 3600.0  # seconds after which a failure is tried again, and a leftover is removed


@cache
def library() -> Path:
    """Where the compiled file lies, or will lie.

    Raises:
        RuntimeError: it cannot be compiled here.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"the C++ way needs Linux, and this is {sys.platform}")
    parts = (
        *(file.read_text() for file in sorted(SOURCE.parent.glob("*.[hc]*"))),
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        platform.machine(),
        _version(compiler()),
        *_FLAGS,
    )
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return _folder() / f"{_NAME}-{key}.so"


def compiler() -> str:
    """The C++ compiler: `CXX`, or the first that is found.

    Raises:
        RuntimeError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if (found := shutil.which(name)) is not None:
            return found
    raise RuntimeError(
        f"no C++ compiler was found (CXX is {wanted})"
        if wanted
        else f"no C++ compiler was found ({', '.join(_COMPILERS)})"
    )


def compile_now(target: Path) -> None:
    """Compile, and wait.

    Raises:
        RuntimeError: the compiler fails, or the result cannot be written.
    """
    _failure_file(target).unlink(missing_ok=True)
    _compilation(target).wait()
    if not target.exists():
        raise RuntimeError(f"normplug: the host path cannot be compiled: {failure(target)}")


def compile_in_background(target: Path) -> subprocess.Popen[bytes]:
    """Start the compiler, which goes on if this process ends.

    Raises:
        RuntimeError: it has failed lately, or the result cannot be written.
    """
    note = _failure_file(target)
    if note.exists() and time.time() - note.stat().st_mtime < _STALE:
        raise RuntimeError(
            f"{failure(target)}. `python -m normplug.native build` tries again, and shows why"
        )
    return _compilation(target)


def failure(target: Path) -> str:
    """Why a compilation failed: the first line that speaks of an error."""
    try:
        lines = _failure_file(target).read_text(errors="replace").splitlines()
    except OSError:
        return "the compiler was stopped"
    wrong = [line for line in lines if "error" in line.lower()] or lines
    return f"the compiler failed: {wrong[0].strip()}" if wrong else "the compiler failed"


def load(path: Path) -> ModuleType:
    """Import the compiled file.

    Raises:
        ImportError: it cannot be loaded.
    """
    loader = ExtensionFileLoader(_NAME, str(path))
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def _compilation(target: Path) -> subprocess.Popen[bytes]:
    """Start the compiler; what it writes takes its place at once, and whole."""
    part = target.with_name(f"{target.name}.{uuid4().hex}.part")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        part.touch()
    except OSError as error:
        raise RuntimeError(f"{target.parent} cannot be written to: {error}") from error
    # A process of its own session: it outlives this one, and no Ctrl-C reaches it.
    script = (
        '"$@" >"$NOTE.part" 2>&1 && mv -f "$PART" "$TARGET" && rm -f "$NOTE.part" && exit 0; '
        'rm -f "$PART"; mv -f "$NOTE.part" "$NOTE"; exit 1'
    )
    note = _failure_file(target)
    places = {"PART": str(part), "TARGET": str(target), "NOTE": str(note)}
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *command(part)],
        env={**os.environ, **places},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def command(output: Path) -> list[str]:
    """The compiler's command line."""
    root = Path(torch.__file__).parent
    return [
        *shlex.split(compiler()),
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


def _folder() -> Path:
    chosen = os.environ.get("NORMPLUG_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normplug"


def _failure_file(target: Path) -> Path:
    return target.with_suffix(".failed.txt")


def _remove_leftovers(folder: Path) -> None:
    """Remove what compilers that were killed have left."""
    for part in folder.glob("*.part"):
        try:
            if time.time() - part.stat().st_mtime > _STALE:
                part.unlink()
        except OSError:  # another process was faster
            continue


def _version(compiler: str) -> str:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{compiler} does not run: {error}") from error
    return done.stdout
