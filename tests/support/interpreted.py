"""The kernels' tests where Triton interprets them: their marks, and processes that run them."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

from normplug._kernels.launch import INTERPRETED  # noqa: E402

MARKS = [
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: see test_interpreter"),
    # numpy's, where a GPU says nothing: exp of much, and values that are masked afterwards.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    # The interpreter's own, of Triton before 3.7.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # torch's own, of its forward mode.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def _patch_each_module_once_a_launch():
    """Triton patches `tl` at each call of a helper, which takes as long as all arithmetic does."""
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched = set()

    def patch_once(fn):
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_anew(*args, **kwargs):
        patched.clear()
        return launch(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_once


def _leave_out_checks_that_say_nothing():
    """Each sum of integers is computed again for an assertion, which only debugging looks at."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    _patch_each_module_once_a_launch()
    _leave_out_checks_that_say_nothing()


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# Triton's interpreter takes numpy 2.4 from its version 3.7 on.
INTERPRETS = version(triton) >= (3, 7) or version(np) < (2, 4)
NEEDS_INTERPRETER = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ or not INTERPRETS,
    reason="interpreted already, or numpy is too new for this Triton",
)


def run(*files, native):
    """Run tests in a process in which Triton interprets; native: its NORMPLUG_NATIVE."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=short", "--color=no"]
    done = subprocess.run(
        [*command, *files],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "NORMPLUG_NATIVE": native},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    if done.returncode != 0:
        pytest.fail(output, pytrace=False)
    assert "passed" in output
    assert "skipped" not in output
