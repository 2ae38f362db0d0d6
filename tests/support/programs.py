"""Run programs in processes of their own."""

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from filelock import FileLock

ROOT = Path(__file__).parents[2]
FOLDERS = [
    str(ROOT),
    *(str(ROOT / "tests" / name) for name in ("support", "kernels", "interpreted")),
]
PATHS = [*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
# Torch takes longer to import than most programs run: where it can, a server imports it once, and
# forks. Windows has no such server.
STARTS = [
    m for m in ("forkserver", "spawn") if m in multiprocessing.get_all_start_methods()
]
PROCESSES = multiprocessing.get_context(STARTS[0])
PROCESSES.set_forkserver_preload(["torch"])


def program(code, *arguments, hidden=(), environment=None, directory=ROOT):
    """Run a Python program that may import this repository; return the finished process.

    arguments: its `sys.argv`, if any. hidden: packages that it cannot import.
    """
    environment = {**os.environ, **FIXED, **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        given = (code, [*map(str, arguments)], hidden, environment, directory, printed)
        process = PROCESSES.Process(target=_run, args=given)
        process.start()
        process.join()
        stdout, stderr = (path.read_text() for path in printed)
    return SimpleNamespace(returncode=process.exitcode, stdout=stdout, stderr=stderr)


def _run(code, arguments, hidden, environment, directory, printed):
    for stream, path in zip((sys.stdout, sys.stderr), printed, strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    warnings.simplefilter("ignore")
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = ["", *FOLDERS]
    sys.argv = arguments or ["-c"]
    sys.modules.update(dict.fromkeys(hidden))
    exec(code, {"__name__": "__main__"})


@contextmanager
def shared_folder(factory, name):
    """A folder that all of pytest's processes share, for one of them at a time."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    folder.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        yield folder


def wait_until(ready):
    """Wait for what another thread or process does."""
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.005)
