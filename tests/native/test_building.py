"""Whether, when and where the host path is compiled, with shell scripts as compilers."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

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
WAIT = "while [ ! -e {} ]; do sleep 0.05; done"
A_DAY = 25 * 3600


class Compiler:
    """A shell script in the compiler's place."""

    def __init__(self, folder):
        self.path, self.calls = folder / "compiler", folder / "calls"
        self.does(WRITE)

    def does(self, what):
        new = self.path.with_suffix(".new")
        new.write_text(SCRIPT.format(calls=self.calls, does=what))
        new.chmod(0o755)
        new.replace(self.path)  # a running script cannot be overwritten

    def count(self):
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "cache"


@pytest.fixture
def compiler(monkeypatch, tmp_path, folder):
    """The compiler of a fresh environment, in which no kernel has been needed yet."""
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("NORMPLUG_CACHE_DIR", str(folder))
    monkeypatch.setenv("NORMPLUG_NATIVE", "auto")
    extension = native._extension
    restart(monkeypatch)
    yield made
    native._use(extension)
    building.library.cache_clear()


def restart(monkeypatch):
    """Reset the state to that of a new process."""
    native._use(None)
    for name, value in (
        ("_started", False),
        ("_status", native._NOT_STARTED),
        ("_loaded", None),
    ):
        monkeypatch.setattr(native, name, value)
    building.library.cache_clear()


@pytest.fixture
def loads(monkeypatch):
    """Accept what the script has written as a library."""

    def load(path):
        if not Path(path).read_bytes().startswith(b"compiled\n"):
            raise ImportError(f"{path}: invalid ELF header")
        return Mock()

    monkeypatch.setattr(building, "_import", load)


def compiled(library):
    """What the compiler has written to a library, without the digest after it."""
    return library.read_bytes()[: -building._DIGEST].decode()


def compile_now(library):
    building.finish(building.start_compiler(library), library)


def start():
    """Need a kernel, wait for the build that this starts, and return the status."""
    native.start()
    wait_until(lambda: native.status().why != "the host path in C++ is being compiled")
    return native.status()


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]


NOT_STARTED = "no CUDA device: PyTorch's kernels run, no gain in speed to expect"
if torch.cuda.is_available():
    NOT_STARTED = "no kernel has been needed yet"


# Every way that a build can end.


def test_it_is_compiled_when_a_kernel_is_needed(compiler, loads, folder, caplog):
    assert str(native.status()) == f"normplug: calls run through Python: {NOT_STARTED}."
    status = start()
    assert status.way == "C++"
    assert [status.library] == [*folder.iterdir()]
    why = f"the host path is compiled ({status.library})"
    assert str(status) == f"normplug: calls run through C++: {why}."
    native.start()
    assert compiler.count() == 1
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("environment", "does", "why"),
    [
        (
            {"CXX": "nowhere --fast"},
            WRITE,
            "no C++ compiler was found (CXX is nowhere --fast)",
        ),
        (
            {"CXX": "", "PATH": "/"},
            WRITE,
            "no C++ compiler was found (g++, c++, clang++)",
        ),
        (
            {"NORMPLUG_CACHE_DIR": "/dev/null/x"},
            WRITE,
            "/dev/null/x cannot be written to",
        ),
        ({}, "rm -r $(dirname $out); exit 1", "the compiler was stopped"),  # a full disk
        (
            {"LC_ALL": "de_DE"},
            'echo "error: in $LC_ALL"; exit 1',
            "compiler failed: error: in C (",
        ),
        ({}, "exit 1", "the compiler failed: it printed nothing ("),
    ],
    ids=["no CXX", "none", "folder", "stopped", "in English", "silent"],
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
    assert warnings(caplog) == [str(status)]
    with pytest.raises(RuntimeError, match=re.escape(why)):
        native.build()


def test_another_process_loads_the_library_and_needs_no_compiler(
    compiler, loads, monkeypatch
):
    library = start().library
    for found in (compiler.path, "nowhere"):
        restart(monkeypatch)
        monkeypatch.setenv("CXX", str(found))
        native.start()
        assert (native.status().way, native.status().library) == ("C++", library)
    assert compiler.count() == 1


def test_a_compiler_that_fails_is_not_tried_again_for_a_day(
    compiler, monkeypatch, folder, caplog
):
    compiler.does(FAIL)
    note = building.library().with_suffix(".failed.txt")
    why = f"the compiler failed: some.cpp:2: error: no luck ({note})"
    assert start()[:3] == ("Python", why, None)
    assert warnings(caplog) == [str(native.status())]
    assert note.read_text() == "some.cpp:1\nsome.cpp:2: error: no luck\n"
    restart(monkeypatch)
    again = "`python -m normplug.native build` tries again, and shows why"
    assert start().why == f"{why}. {again}"
    assert compiler.count() == 1
    os.utime(note, times=(time.time() - A_DAY,) * 2)
    restart(monkeypatch)
    assert start().why == why
    assert compiler.count() == 2
    assert [*folder.iterdir()] == [note]


def test_a_killed_compiler_leaves_nothing_harmful(compiler, loads, monkeypatch, folder):
    compiler.does(f'echo half > "$out"; touch {folder}/half; sleep 60')
    library = building.library()
    process = building.start_compiler(library)
    wait_until((folder / "half").exists)
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the compiler was stopped"):
        building.finish(process, library)
    left = [*folder.glob("*.part")]
    assert left
    assert not library.exists()
    # The next process tries again. Later, old leftovers are removed.
    compiler.does(WRITE)
    assert start().way == "C++"
    assert {*folder.glob("*.part")} == {*left}
    for part in left:
        os.utime(part, times=(time.time() - A_DAY,) * 2)
    compile_now(library)
    assert not [*folder.glob("*.part")]


def test_the_clean_up_leaves_every_file_of_the_user(compiler, folder):
    library = building.library()
    of_a_compiler = f"{library.name}.{'0' * 32}.part"
    (folder / "Downloads").mkdir(parents=True)
    directory = folder / f"{library.name}.{'1' * 32}.part"
    directory.mkdir()
    kept = [
        folder / "weights.part",
        folder / f"{library.name}.part",
        folder / f"copy of {of_a_compiler}",
        folder / "Downloads" / "thesis.zip.part",
        folder / "Downloads" / of_a_compiler,
    ]
    removed = [folder / of_a_compiler, folder / f"{of_a_compiler}.txt.part"]
    for path in (*kept, *removed):
        path.write_text("text")
    for path in (*kept, *removed, directory):
        os.utime(path, times=(time.time() - A_DAY,) * 2)
    folder.chmod(0o700)
    compile_now(library)
    assert [path for path in kept if not path.exists()] == []
    assert [path for path in removed if path.exists()] == []
    assert directory.is_dir()


def test_several_processes_may_build_at_once_and_one_may_fail(compiler, folder, tmp_path):
    library, processes, gate = building.library(), [], tmp_path / "gate"
    wait = WAIT.format(gate)
    slow = f'printf half > "$out"; {wait}; printf whole >> "$out"'
    for started, does in enumerate((slow, slow, f"{wait}; {FAIL}"), 1):
        compiler.does(does)
        processes.append(building.start_compiler(library))
        wait_until(lambda started=started: compiler.count() == started)
    assert not library.exists()
    gate.touch()
    for process in processes:
        building.finish(process, library)
    assert compiled(library) == "halfwhole"
    assert not [*folder.glob("*.part")]


# What is compiled, and where.


def test_another_torch_python_machine_or_source_means_another_file(monkeypatch, tmp_path):
    def library():
        building.library.cache_clear()
        return building.library()

    source = tmp_path / "host_path.cpp"
    source.write_text("int one;")
    monkeypatch.setattr(building, "SOURCE", source)
    found = [library(), library()]
    for name in ("torch.__version__", "torch.version.git_version", "sys.version"):
        monkeypatch.setattr(f"normplug.native.building.{name}", "other")
        found.append(library())
    monkeypatch.setattr("normplug.native.building.platform.machine", lambda: "other")
    found.append(library())
    for text in ("int two;", "int three;"):
        (tmp_path / "header.h").write_text(text)
        found.append(library())
    assert len(set(found)) == len(found) - 1


def test_cxx_may_contain_options(compiler, monkeypatch):
    monkeypatch.setenv("CXX", f"{compiler.path} -fast")
    assert building.command(Path("out"))[:2] == [str(compiler.path), "-fast"]


def test_the_environment_sets_where_the_library_lies(compiler, monkeypatch, folder):
    assert building.library().parent == folder
    monkeypatch.delenv("NORMPLUG_CACHE_DIR")
    for name, below in (("XDG_CACHE_HOME", "normplug"), ("HOME", ".cache/normplug")):
        monkeypatch.setenv(name, f"/{name}")
        building.library.cache_clear()
        assert building.library().parent == Path(f"/{name}", below)
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("damage", "way"),
    [("cut short", "auto"), ("empty", "1"), ("without a digest", "auto")],
)
def test_a_damaged_library_is_compiled_again_and_never_loaded(
    damage, way, compiler, loads, monkeypatch
):
    library = start().library
    whole = library.read_bytes()
    damaged = {"cut short": whole[:-1], "empty": b""}
    library.write_bytes(damaged.get(damage, whole[: -building._DIGEST]))
    restart(monkeypatch)
    monkeypatch.setenv("NORMPLUG_NATIVE", way)
    assert start().way == "C++"
    assert library.read_bytes() == whole
    assert compiler.count() == 2


def test_a_library_that_cannot_be_loaded_is_compiled_again_once_and_reported(compiler):
    library = building.library()
    compile_now(library)
    assert "invalid ELF header" in start().why
    assert not library.exists()
    with pytest.raises(RuntimeError, match="cannot be compiled: .*invalid ELF header"):
        native.build()
    assert compiler.count() == 3


NEEDS_ROOT = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can give a folder away"
)


@pytest.mark.parametrize(
    "which", ["folder", "file", pytest.param("owner", marks=NEEDS_ROOT)]
)
def test_a_library_that_others_can_write_to_is_not_loaded(which, compiler, folder):
    library = building.library()
    compile_now(library)
    path = library if which == "file" else folder
    if which == "owner":
        os.chown(folder, 1, -1)
        why = f"{folder} belongs to another user"
    else:
        path.chmod(0o775)
        why = f"others can write to {path}; run `chmod go-w` on it"
    assert why in start().why
    with pytest.raises(RuntimeError, match=re.escape(why)):
        native.build()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_the_user_can_enter_the_folder(umask, compiler, loads, folder):
    before = os.umask(umask)
    try:
        library = start().library
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not library.stat().st_mode & 0o022


# NORMPLUG_NATIVE, the command, and the process around them.


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of Python 3.12, with threads
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
        with pytest.raises(
            ValueError, match="NORMPLUG_NATIVE must be 0, 1 or auto, not 'yes'"
        ):
            native.start()
    monkeypatch.setenv("NORMPLUG_NATIVE", "0")
    assert start()[:3] == ("Python", "NORMPLUG_NATIVE is 0", None)
    assert compiler.count() == 0
    assert not warnings(caplog)


def test_normplug_native_1_waits_for_the_build_or_raises(compiler, loads, monkeypatch):
    monkeypatch.setenv("NORMPLUG_NATIVE", "1")
    compiler.does(FAIL)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="the host path cannot be compiled: .*no luck"
        ):
            native.start()
    compiler.does(WRITE)
    native.start()
    assert native.status().way == "C++"


def test_python_way_sends_calls_through_python(compiler, loads):
    with native.python_way():
        with native.python_way():
            assert start().way == "C++"
        assert native.call(None, "auto", ()) is native._extension is None
    assert native._extension is native._loaded is not None
    assert native.call is native._loaded.call


def test_the_command_builds_and_prints_the_status(compiler, loads, capsys):
    library = building.library()

    def run(command):
        return (__main__.main([command]), *capsys.readouterr())

    assert run("status") == (1, "", f"{library} is not compiled yet\n")
    compiler.does(FAIL)
    for command in ("build", "status", "build"):
        code, out, error = run(command)
        assert (code, out) == (1, "")
        assert "error: no luck" in error
    assert compiler.count() == 2
    compiler.does(WRITE)
    assert run("build") == run("build") == run("status") == (0, f"{library}\n", "")
    assert compiler.count() == 3
    library.write_bytes(b"C" + library.read_bytes()[1:])
    damaged = f"{library}: it was cut short or changed after it was compiled\n"
    assert run("status") == (1, "", damaged)
    assert run("build") == (0, f"{library}\n", "")
    assert compiler.count() == 4


IMPORT = """
import threading, torch, normplug
from normplug import native
normplug.swap(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))(torch.randn(2, 3)).sum().backward()
print(native.status().why, threading.active_count(), sep=";")
native.start()
print(native.status().why)
"""


def test_an_import_starts_nothing_and_a_build_outlives_its_process(compiler, tmp_path):
    gate = tmp_path / "gate"
    compiler.does(f"{WAIT.format(gate)}; {WRITE}")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == f"{NOT_STARTED};1"
    assert second == "the host path in C++ is being compiled"
    library = building.library()
    assert not library.exists()
    gate.touch()
    wait_until(library.exists)
    assert compiled(library) == "compiled\n"


def test_the_status_says_where_kernels_came_from(monkeypatch):
    monkeypatch.setattr(native, "kernels", {"here": 2, "workers": 30, "cache": 5})
    said = (
        "Kernels: 2 compiled by this process, 30 by its workers, 5 from Triton's cache."
    )
    assert str(native.status()).endswith(said)
