"""The examples run as they stand, with fewer steps."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Each example: what it needs beyond torch, and what it says last.
SAID = {
    "plain_loop": ((), "stock again: accuracy"),
    "lightning_watch": (("lightning",), "has variance.csv"),
    "hugging_face": (("transformers", "accelerate"), "the published model: "),
}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_an_example_runs_to_its_end(name, tmp_path):
    needs, last = SAID[name]
    for library in needs:
        pytest.importorskip(library)
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert last in done.stdout.splitlines()[-1]
