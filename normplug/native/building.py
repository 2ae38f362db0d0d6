"""Compile `host_path.cpp`: where the result is cached, by which compiler, in which process."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
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
_STALE = 24 * 3600.0  # seconds after which a failure is retried, and a partial file removed
_TIMEOUT = 600.0  # seconds that the compiler may take
_DIGEST = 68  # bytes at the end of a compiled file: what `sha256sum` prints of the rest
_loaded: dict[bytes, ModuleType] = {}  # by digest


class Damaged(ImportError):
    """A compiled file is not as the compiler wrote it."""


@cache
def library() -> Path:
    """The path of the compiled file, whether or not it exists yet.

    Raises:
        RuntimeError: there is no such file, and it cannot be compiled here.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"the host path in C++ needs Linux; this is {sys.platform}")
    needs = _digest(
        *(path.read_text() for path in _sources()),
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        str(sysconfig.get_config_var("SOABI")),
        platform.machine(),
        *_FLAGS,
    )
    try:
        made_by = _digest(_version(compiler()))
    except RuntimeError:  # a container image may have the file but no compiler
        found = sorted(_folder().glob(f"{_NAME}-{needs}-*.so"))
        if not found:
            raise
        return found[0]
    return _folder() / f"{_NAME}-{needs}-{made_by}.so"


def compiler() -> list[str]:
    """The C++ compiler's command: `CXX`, or the first of `_COMPILERS` that is found.

    Raises:
        RuntimeError: no compiler is found.
    """
    wanted = os.environ.get("CXX", "").strip()
    commands = [shlex.split(wanted)] if wanted else [[name] for name in _COMPILERS]
    for name, *options in commands:
        if (found := shutil.which(name)) is not None:
            return [found, *options]
    tried = f"CXX is {wanted}" if wanted else ", ".join(_COMPILERS)
    raise RuntimeError(f"no C++ compiler was found ({tried})")


def compile_now(target: Path) -> None:
    """Compile and wait.

    Raises:
        RuntimeError: the compiler fails, or the result cannot be written.
    """
    finish(_compilation(target), target)


def compile_in_background(target: Path) -> subprocess.Popen[bytes]:
    """Start the compiler, which continues even if this process ends.

    Raises:
        RuntimeError: it failed less than a day ago, or the result cannot be written.
    """
    note = _failure_file(target)
    if note.exists() and time.time() - note.stat().st_mtime < _STALE:
        raise RuntimeError(
            f"{failure(target)}. `python -m normplug.native build` tries again, and shows why"
        )
    return _compilation(target)


def finish(process: subprocess.Popen[bytes], target: Path) -> None:
    """Wait for a compilation.

    Raises:
        RuntimeError: it failed; the message says why.
    """
    try:
        process.wait(_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _failure_file(target).write_text(f"error: it took more than {_TIMEOUT:.0f} seconds\n")
    if not target.exists():  # another process may have compiled it
        raise RuntimeError(failure(target) or "the compiler was stopped")


def failure(target: Path) -> str | None:
    """Why the last compilation failed; None if it did not fail, or was killed.

    The reason is the first line of output that mentions an error. The file has all lines.
    """
    note = _failure_file(target)
    try:
        lines = [line.strip() for line in note.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    output = [line for line in lines if line]
    why = next((line for line in output if "error" in line.lower()), output[0] if output else "")
    return f"the compiler failed: {why or 'it printed nothing'} ({note})"


def load(path: Path) -> ModuleType:
    """Import the compiled file. It is opened once, so that the checked file is the loaded one.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it was cut short or changed; it has been removed.
        ImportError: it cannot be loaded.
        RuntimeError: another user could have written it.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_owner(path.parent, os.fstat(folder))
        file = os.open(path.name, os.O_RDONLY, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_owner(path, os.fstat(file))
        content = Path(f"/proc/self/fd/{file}").read_bytes()
        digest = content[-_DIGEST:]
        if digest != b"%s  -\n" % hashlib.sha256(content[:-_DIGEST]).hexdigest().encode():
            # To map a file that was cut short can kill the process.
            with suppress(OSError):
                path.unlink()
            raise Damaged(f"{path}: it was cut short or changed after it was compiled")
        if digest not in _loaded:
            # Loaders tell files apart by path, so the number of this one must not be used again.
            _loaded[digest] = _import(f"/proc/self/fd/{os.dup(file)}")
    finally:
        os.close(file)
    return _loaded[digest]


def _import(path: str) -> ModuleType:
    loader = ExtensionFileLoader(_NAME, path)
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=path))
    loader.exec_module(module)
    return module


def _compilation(target: Path) -> subprocess.Popen[bytes]:
    """Start the compiler. A complete output is renamed to `target`, so that nobody loads half."""
    part = target.with_name(f"{target.name}.{uuid4().hex}.part")
    note = _failure_file(target)
    try:
        _make_folder(target.parent)
        _check_owner(target.parent, target.parent.stat())
        _remove_leftovers(target.parent)
        part.touch(mode=0o644)
        note.unlink(missing_ok=True)
    except OSError as error:
        raise RuntimeError(f"{target.parent} cannot be written to: {error}") from error
    # In a session of its own, the compiler outlives this process, and Ctrl-C does not reach it.
    script = (
        'umask 022; { "$@" && sha256sum <"$PART" >>"$PART" && sync "$PART"; } >"$LOG" 2>&1 '
        '&& mv -f "$PART" "$TARGET" && rm -f "$LOG" && exit 0; '
        'rm -f "$PART"; mv -f "$LOG" "$NOTE"; exit 1'
    )
    log = part.with_name(f"{part.name}.txt.part")
    paths = {"PART": str(part), "LOG": str(log), "TARGET": str(target), "NOTE": str(note)}
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *command(part)],
        env={**os.environ, "LC_ALL": "C", **paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def command(output: Path) -> list[str]:
    """The compiler's command line."""
    root = Path(torch.__file__).parent
    return [
        *compiler(),
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


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _sources() -> list[Path]:
    """`host_path.cpp` and its headers."""
    return sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".cpp", ".h"))


def _folder() -> Path:
    chosen = os.environ.get("NORMPLUG_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normplug"


def _failure_file(target: Path) -> Path:
    return target.with_suffix(".failed.txt")


def _remove_leftovers(folder: Path) -> None:
    """Remove the partial files that killed compilers have left."""
    for part in folder.glob("*.part"):
        try:
            if time.time() - part.stat().st_mtime > _STALE:
                part.unlink()
        except OSError:  # another process removed it first
            continue


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, each for this user only, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            with suppress(FileExistsError):  # another process created it first
                path.mkdir()
                path.chmod(0o700)


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Refuse what other users can write to, since loading a library runs its code."""
    if found.st_uid not in (os.getuid(), 0):
        raise RuntimeError(f"{path} belongs to another user; set NORMPLUG_CACHE_DIR")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"others can write to {path}; run `chmod go-w` on it, or set NORMPLUG_CACHE_DIR"
        )


def _version(command: list[str]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{command[0]} does not run: {error}") from error
    return done.stdout
