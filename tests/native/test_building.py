"""When and where the host path is compiled, with a shell script as the compiler."""

import logging
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import normplug
from normplug import native
from normplug.native import __main__, building
from programs import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux only")

SCRIPT = """#!/bin/sh
echo called >> {calls}
while [ "$1" != -o ]; do shift; done
out=$2
{does}
"""
WRITE = 'echo compiled > "$out"'
FAIL = "echo some.cpp:1; echo 'some.cpp:2: error: no luck'; exit 1"


class Compiler:
    """A shell script in the compiler's place."""

    def __init__(self, folder):
        self.path = folder / "compiler"
        self.calls = folder / "calls"
        self.does(WRITE)

    def does(self, what):
        self.path.write_text(SCRIPT.format(calls=self.calls, does=what))
        self.path.chmod(0o755)

    def count(self):
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def load(path):
    """Accept what the script writes as a library."""
    if path.read_text() != "compiled\n":
        raise ImportError(f"{path}: invalid ELF header")
    return Mock()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "cache"


@pytest.fixture
def compiler(monkeypatch, tmp_path, folder):
    """The compiler of a new process."""
    script = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(script.path))
    monkeypatch.setenv("NORMPLUG_CACHE_DIR", str(folder))
    monkeypatch.setenv("NORMPLUG_NATIVE", "auto")
    monkeypatch.setattr(building, "_import", load)
    restart(monkeypatch)
    yield script
    building.library.cache_clear()


def restart(monkeypatch):
    """Reset the state to that of a new process."""
    monkeypatch.setattr(native, "path", native.PYTHON)
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(native, "_started", False)
    monkeypatch.setattr(native, "_state", native._NOT_STARTED)
    building.library.cache_clear()


def start():
    """Need a kernel, wait for the build that this starts, and return the status."""
    native.start()
    compiling = "the C++ launcher is being compiled"
    wait_until(lambda: normplug.status().why != compiling)
    return normplug.status()


def warnings(caplog):
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_it_is_compiled_once_when_a_kernel_is_needed(
    compiler, folder, monkeypatch, caplog
):
    why = "no CUDA device, so PyTorch's kernels run and nothing gets faster"
    if torch.cuda.is_available():
        why = "no kernel has been needed yet"
    first = f"normplug: calls run through Python: {why}."
    assert str(normplug.status()).startswith(first)
    status = start()
    assert (status.way, [status.library]) == ("C++", [*folder.iterdir()])
    why = f"the C++ launcher is compiled ({status.library})"
    assert str(status).startswith(f"normplug: calls run through C++: {why}.")
    restart(monkeypatch)  # another process needs no compiler
    monkeypatch.setenv("CXX", "nowhere")
    assert start().library == status.library
    assert compiler.count() == 1
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("environment", "does", "why"),
    [
        ({"CXX": "nowhere --fast"}, WRITE, "no C++ compiler was found: nowhere"),
        ({"CXX": "", "PATH": "/"}, WRITE, "no C++ compiler was found: c++"),
        ({"NORMPLUG_CACHE_DIR": "/dev/null/x"}, WRITE, "Not a directory: '/dev/null/x'"),
        ({"LC_ALL": "de"}, 'echo "error in $LC_ALL"; exit 1', "failed: error in C"),
        ({}, FAIL, "the compiler failed: some.cpp:2: error: no luck"),
        ({}, "exit 1", "the compiler failed: it printed nothing"),
        ({}, "kill -9 $PPID", "the compiler failed: it printed nothing"),
        ({}, 'echo half > "$out"', "invalid ELF header"),
    ],
    ids=[
        "no CXX",
        "none",
        "folder",
        "in English",
        "an error",
        "silent",
        "killed",
        "unloadable",
    ],
)
def test_a_build_that_fails_is_one_warning(
    environment, does, why, compiler, monkeypatch, caplog
):
    compiler.does(does)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status = start()
    assert (status.way, status.library) == ("Python", None)
    assert why in status.why
    assert start() == status
    assert len(warnings(caplog)) == 1
    assert not building.library().exists()
    monkeypatch.setenv("NORMPLUG_NATIVE", "1")  # waits, and raises each time
    restart(monkeypatch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"cannot be compiled: .*{re.escape(why)}"):
            native.start()


def test_several_processes_may_compile_at_once(compiler, folder, tmp_path):
    library = building.library()
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.05; done"
    compiler.does(f'printf comp > "$out"; {wait}; echo iled >> "$out"')
    with ThreadPoolExecutor() as threads:
        builds = [threads.submit(native.build) for _ in range(2)]
        wait_until(lambda: compiler.count() == 2)
        too_early = library.exists()
        gate.touch()
        assert [build.result() for build in builds] == [library, library]
    assert not too_early
    assert [*folder.iterdir()] == [library]


def test_the_compiler_goes_on_when_the_process_ends(compiler, tmp_path):
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.05; done"
    compiler.does(f"{wait}; echo a warning; {WRITE}")
    program = f"""
import os, time
from normplug import native
native.start()
while not os.path.exists({str(compiler.calls)!r}): time.sleep(0.05)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    gate.touch()
    wait_until(building.library().exists)
    assert compiler.count() == 1


def test_another_torch_python_or_source_means_another_file(
    compiler, monkeypatch, tmp_path
):
    def library():
        building.library.cache_clear()
        return building.library()

    source = tmp_path / "host_path.cpp"
    source.write_text("int one;")
    monkeypatch.setattr(building, "SOURCE", source)
    libraries = [library()]
    assert library() == libraries[0]
    (tmp_path / "header.h").write_text("int two;")
    libraries.append(library())
    monkeypatch.setattr(torch, "__version__", "other")
    libraries.append(library())
    monkeypatch.setattr(building.sysconfig, "get_config_var", lambda name: "other")
    libraries.append(library())
    assert len(set(libraries)) == 4
    monkeypatch.delenv("NORMPLUG_CACHE_DIR")
    for name, below in (("XDG_CACHE_HOME", "normplug"), ("HOME", ".cache/normplug")):
        monkeypatch.setenv(name, f"/{name}")
        assert library().parent == Path(f"/{name}", below)
        monkeypatch.delenv(name)


def test_a_library_that_cannot_be_loaded_is_compiled_again(compiler, monkeypatch):
    # `CXX` may have options.
    monkeypatch.setenv("CXX", f"{compiler.path} -fast")
    for way in ("auto", "1"):
        start().library.write_text("comp")
        restart(monkeypatch)
        monkeypatch.setenv("NORMPLUG_NATIVE", way)
        assert start().library.read_text() == "compiled\n"
    assert compiler.count() == 3


@pytest.fixture
def umask_0():
    """Files that others can write to, unless a program asks for another mode."""
    before = os.umask(0)
    yield
    os.umask(before)


NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    "which", ["folder", "file", pytest.param("owner", marks=NEEDS_ROOT)]
)
def test_a_library_that_others_can_write_to_is_not_loaded(
    which, compiler, folder, umask_0
):
    library = native.build()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not library.stat().st_mode & 0o022
    path = library if which == "file" else folder
    if which == "owner":
        os.chown(folder, 1, -1)
    else:
        path.chmod(0o775)
    why = f"others can write to {path}; run `chmod go-w` on it"
    assert why in start().why
    with pytest.raises(RuntimeError, match=re.escape(why)):
        native.build()


# Python 3.12 warns about a fork beside threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_a_thread_starts_does_not_wait_for_it(monkeypatch):
    monkeypatch.setenv("NORMPLUG_NATIVE", "0")
    restart(monkeypatch)
    with native._starting:
        if (child := os.fork()) == 0:
            signal.alarm(20)  # ends it if it waits for a thread that it does not have
            native.start()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_normplug_native_0_compiles_nothing_and_another_value_is_rejected(
    compiler, monkeypatch, caplog
):
    monkeypatch.setenv("NORMPLUG_NATIVE", "yes")
    for _ in range(2):
        with pytest.raises(ValueError, match="must be 0, 1 or auto, not 'yes'"):
            native.start()
    monkeypatch.setenv("NORMPLUG_NATIVE", "0")
    assert start()[:3] == ("Python", "NORMPLUG_NATIVE is 0", None)
    assert compiler.count() == 0
    assert not warnings(caplog)


def test_python_way_sends_calls_through_python(compiler):
    with native.python_way():
        with native.python_way():
            assert start().way == "C++"
        assert native.path.run_call(None, "auto", ()) is None
        assert native.path is native.PYTHON
    assert native.path is native._loaded is not None


def test_the_command_builds_and_prints_the_status(compiler, capsys):
    library = building.library()

    def run(command):
        return (__main__.main([command]), *capsys.readouterr())

    assert run("status") == (1, "", f"{library} is not compiled yet\n")
    compiler.does(FAIL)
    code, out, error = run("build")
    assert (code, out) == (1, "")
    assert "error: no luck" in error
    compiler.does(WRITE)
    assert run("build") == run("build") == run("status") == (0, f"{library}\n", "")
    assert compiler.count() == 2


@pytest.mark.parametrize("name", ["status", "Status"])
def test_the_old_names_of_the_status_warn(name):
    with pytest.warns(DeprecationWarning, match=rf"native\.{name} .* normplug\.status"):
        assert getattr(native, name) in (normplug.status, type(normplug.status()))
