"""The kernels' tests run in processes of their own, where Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from routes import HAS_RECOMPUTE

triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# Triton's interpreter takes numpy 2.4 from its version 3.7 on.
RUNS = "TRITON_INTERPRET" not in os.environ and (version(triton) >= (3, 7) or version(np) < (2, 4))
FILES = [
    "test_layer_norm_kernels.py",
    "test_layer_norm_layouts.py",
    "test_pool_kernels.py",
    "test_calls.py",
    "test_batch_norm_kernels.py",
]
# What goes the C++ way, and is most about autograd.
CPP_FILES = ["../native/test_host_path.py"]
if HAS_RECOMPUTE:
    FILES.append("test_recompute.py")
    CPP_FILES.append("test_recompute.py")
WAYS = {"Python": ("0", FILES), "C++": ("1", CPP_FILES)}


@pytest.mark.skipif(not RUNS, reason="interpreted already, or numpy is too new for this Triton")
@pytest.mark.parametrize("way", WAYS)
def test_the_kernels_pass_their_tests_in_tritons_interpreter(way):
    native, files = WAYS[way]
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=short", "--color=no"]
    done = subprocess.run(
        [*command, *(folder / name for name in files)],
        cwd=folder.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "NORMPLUG_NATIVE": native},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    if done.returncode != 0:
        pytest.fail(output, pytrace=False)
    assert "passed" in output
    assert "skipped" not in output
