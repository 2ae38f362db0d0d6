"""How tests call normplug.bench in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(*arguments):
    """The finished process of `python -m normplug.bench ...`."""
    return subprocess.run(
        [sys.executable, "-m", "normplug.bench", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
