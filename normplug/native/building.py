"""Compile `host_path.cpp`: where the result is cached, by which compiler, in which process."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
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
_FAILED = ".failed.txt"  # of the file that says why a compilation failed
_A_DAY = 24 * 3600.0  # seconds after which a failure is retried
# The name of a file that `start_compiler` makes, and that a killed compiler leaves behind.
_LEFTOVER = re.compile(_NAME + r"-[0-9a-f]{12}\.so\.[0-9a-f]{32}\.part(\.txt\.part)?")
_DIGEST = 68  # bytes at the end of a compiled file: what `sha256sum` prints of the rest
# "$@" is the compiler. A complete output is renamed to TARGET, so that nobody loads half of it.
_SCRIPT = """
umask 022
{ "$@" && sha256sum <"$PART" >>"$PART" && sync "$PART"; } >"$LOG" 2>&1 &&
    mv -f "$PART" "$TARGET" && rm -f "$LOG" && exit
rm -f "$PART"
mv -f "$LOG" "$NOTE"
"""


@cache
def library() -> Path:
    """The path of the compiled file, whether or not it exists yet."""
    if sys.platform != "linux":
        raise RuntimeError(f"the host path in C++ needs Linux; this is {sys.platform}")
    folder = os.environ.get("NORMPLUG_CACHE_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "normplug"
    )
    sources = [path for path in SOURCE.parent.iterdir() if path.suffix in (".cpp", ".h")]
    needs = [
        *(path.read_text() for path in sorted(sources)),
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        str(sysconfig.get_config_var("SOABI")),
        platform.machine(),
        *_FLAGS,
    ]
    digest = hashlib.sha256("\n".join(needs).encode()).hexdigest()[:12]
    return Path(folder, f"{_NAME}-{digest}.so")


def start_compiler(target: Path, *, again: bool = True) -> subprocess.Popen[bytes]:
    """Start the compiler, which continues even if this process ends.

    again: whether to start it if it failed less than a day ago.
    """
    note = target.with_suffix(_FAILED)
    if not again and note.exists() and time.time() - note.stat().st_mtime < _A_DAY:
        raise RuntimeError(
            f"{failure(target)}. `python -m normplug.native build` tries again, and shows why"
        )
    part = target.with_name(f"{target.name}.{uuid4().hex}.part")
    words = command(part)
    try:
        target.parent.mkdir(0o700, parents=True, exist_ok=True)
        _check_owner(target.parent)
        part.touch(mode=0o644)
        note.unlink(missing_ok=True)
    except OSError as error:
        raise RuntimeError(f"{target.parent} cannot be written to: {error}") from error
    _remove_leftovers(target.parent)
    paths = {"PART": part, "LOG": f"{part}.txt.part", "TARGET": target, "NOTE": note}
    # In a session of its own, the compiler outlives this process, and Ctrl-C does not reach it.
    return subprocess.Popen(
        ["sh", "-c", _SCRIPT, "sh", *words],
        env={
            **os.environ,
            "LC_ALL": "C",
            **{name: str(path) for name, path in paths.items()},
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed compilers have left in the cache folder for more than a day.

    The folder may also hold files of the user. So only regular files directly in it are removed,
    and only those with a name that `start_compiler` makes.
    """
    with suppress(OSError):  # another process may remove them at the same time
        for path in folder.iterdir():
            if not _LEFTOVER.fullmatch(path.name):
                continue
            status = path.lstat()
            is_old = time.time() - status.st_mtime > _A_DAY
            if is_old and stat.S_ISREG(status.st_mode):
                path.unlink()


def finish(process: subprocess.Popen[bytes], target: Path) -> None:
    """Wait for a compilation; a RuntimeError says why it failed."""
    process.wait()
    if not target.exists():  # another process may have compiled it
        raise RuntimeError(failure(target) or "the compiler was stopped")


def failure(target: Path) -> str | None:
    """Why the last compilation failed; None if it did not fail, or was killed.

    The reason is the first line of output that mentions an error. The file has all lines.
    """
    note = target.with_suffix(_FAILED)
    try:
        lines = [line.strip() for line in note.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    output = [line for line in lines if line] or ["it printed nothing"]
    why = next((line for line in output if "error" in line.lower()), output[0])
    return f"the compiler failed: {why} ({note})"


def load(path: Path) -> ModuleType:
    """Import the compiled file, from a folder in which no other user can replace it.

    Raises:
        OSError: there is none.
        ImportError: it was cut short or changed, or cannot be loaded; it has been removed.
        RuntimeError: another user could have written it.
    """
    for each in (path.parent, path):
        _check_owner(each)
    content = path.read_bytes()
    digest = hashlib.sha256(content[:-_DIGEST]).hexdigest()
    try:
        if content[-_DIGEST:] != b"%s  -\n" % digest.encode():
            # To map a file that was cut short can kill the process.
            raise ImportError(
                f"{path}: it was cut short or changed after it was compiled"
            )
        return _import(str(path))
    except ImportError:
        path.unlink(missing_ok=True)
        raise


def _import(path: str) -> ModuleType:
    loader = ExtensionFileLoader(_NAME, path)
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=path))
    loader.exec_module(module)
    return module


def command(output: Path) -> list[str]:
    """The compiler's command line: `CXX`, or the first of `_COMPILERS` that is found."""
    wanted = os.environ.get("CXX", "").strip()
    commands = [shlex.split(wanted)] if wanted else [[name] for name in _COMPILERS]
    found = next((words for words in commands if shutil.which(words[0])), None)
    if found is None:
        tried = f"CXX is {wanted}" if wanted else ", ".join(_COMPILERS)
        raise RuntimeError(f"no C++ compiler was found ({tried})")
    root = Path(torch.__file__).parent
    return [
        *found, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-I{sysconfig.get_paths()['include']}", str(SOURCE),
        "-o", str(output), f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _check_owner(path: Path) -> None:
    """Refuse what other users can write to, since loading a library runs its code."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise RuntimeError(f"{path} belongs to another user; set NORMPLUG_CACHE_DIR")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"others can write to {path}; run `chmod go-w` on it, or set NORMPLUG_CACHE_DIR"
        )
