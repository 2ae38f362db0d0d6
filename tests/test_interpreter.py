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


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="they run in this process already")
@pytest.mark.skipif(
    version(triton) < (3, 7) and version(np) >= (2, 4),
    reason="Triton's interpreter takes numpy 2.4 from its version 3.7 on",
)
@pytest.mark.parametrize(
    "tests",
    [
        "test_kernels.py",
        "test_row_kernels.py",
        "test_pool_kernels.py",
        pytest.param(
            "test_recompute.py",
            marks=pytest.mark.skipif(not recompute.AVAILABLE, reason="needs torch 2.8"),
        ),
    ],
)
def test_the_kernels_pass_their_tests_in_tritons_interpreter(tests):
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", TESTS / tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True)
    output = (done.stdout + done.stderr).decode()
    if done.returncode != 0:
        pytest.fail(output, pytrace=False)
    assert "passed" in output
    assert "skipped" not in output
