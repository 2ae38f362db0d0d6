"""Runs the kernels' tests in a process of their own, where Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from normplug._ops import recompute

triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

TESTS = Path(__file__).parent


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


FILES = ["test_row_kernels.py", "test_recompute.py", "test_kernels.py", "test_pool_kernels.py"]
if not recompute.AVAILABLE:  # needs torch 2.8
    FILES.remove("test_recompute.py")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """(process, where its output goes) for each file: side by side, as each takes one core."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started = {}
    for name in FILES:
        output = tmp_path_factory.mktemp("output") / "log"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", TESTS / name]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=TESTS.parent, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        started[name] = (process, output)
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="they run in this process already")
@pytest.mark.skipif(
    version(triton) < (3, 7) and version(np) >= (2, 4),
    reason="Triton's interpreter takes numpy 2.4 from its version 3.7 on",
)
@pytest.mark.parametrize("name", FILES)
def test_the_kernels_pass_their_tests_in_tritons_interpreter(name, processes):
    process, file = processes[name]
    code = process.wait()
    output = file.read_text()
    if code != 0:
        pytest.fail(output, pytrace=False)
    assert "passed" in output
    assert "skipped" not in output
