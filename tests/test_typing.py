"""What type checkers learn from the package's annotations."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import normplug
from normplug._swap.swap import SwapOptions

ROOT = Path(normplug.__file__).parents[1]
USES = ROOT / "tests/support/typed_uses.py"


def wrong_lines():
    """The numbers of the lines with errors on purpose."""
    lines = USES.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]


def test_mypy_refuses_the_wrong_uses_and_no_other():
    pytest.importorskip("mypy")
    pytest.importorskip("lightning")
    command = [sys.executable, "-m", "mypy", USES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = re.findall(r"typed_uses\.py:(\d+): error", done.stdout)
    assert sorted({*map(int, found)}) == wrong_lines(), done.stdout + done.stderr


def test_pyright_refuses_the_wrong_uses_and_no_other():
    pytest.importorskip("lightning")
    if not shutil.which("pyright"):
        pytest.skip("needs pyright")
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, USES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each for each in found if each["severity"] == "error"]
    lines = {each["range"]["start"]["line"] + 1 for each in errors}
    assert sorted(lines) == wrong_lines(), done.stdout


def test_the_options_that_are_handed_on_are_those_of_swap():
    options = inspect.signature(normplug.swap).parameters.values()
    named = {
        each.name: each.annotation for each in options if each.kind is each.KEYWORD_ONLY
    }
    handed_on = {
        name: hint.__forward_arg__ for name, hint in SwapOptions.__annotations__.items()
    }
    assert handed_on == named
