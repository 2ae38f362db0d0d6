import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training import run_in


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    """Leave what imports made out of garbage collection: a third of an interpreted test's time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries that count what is left at the end report leaks


@pytest.fixture(autouse=True)
def _leave_the_gpus_memory_free(request):
    """For tests beside this one, in other processes."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def interpreters(request, tmp_path_factory):
    """(process, its output's file) by the first file of tests that it runs in Triton's interpreter.

    They take minutes on one core each, so they start first and run beside the other tests.
    """
    tests = [item for item in request.session.items if item.path.name == "test_interpreter.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started = {}
    folder = Path(__file__).parent / "kernels"
    for files in [item.callspec.params["files"] for item in tests if item.module.RUNS]:
        output = tmp_path_factory.mktemp("interpreter") / "log"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no"]
        command += [folder / file for file in files]
        with output.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=folder.parents[1],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started[files[0]] = (process, output)
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Call train.py in a directory of its own: (exit code, its output)."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides):
        capsys.readouterr()
        code = run_in(tmp_path, monkeypatch, *overrides)
        return code, "".join(capsys.readouterr())

    return call
