"""Run programs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *(ROOT / "tests" / name for name in ("support", "kernels"))]
PATHS = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}


def program(code, *arguments, hidden=(), environment=None, directory=ROOT):
    """Run a Python program that may import this repository; return the finished process.

    arguments: its `sys.argv`, if any. hidden: packages that it cannot import.
    """
    start = "import sys; sys.argv = sys.argv[1:] or sys.argv; "
    hide = f"sys.modules.update(dict.fromkeys({list(hidden)}))\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + hide + code, *map(str, arguments)],
        cwd=directory,
        env={**os.environ, **FIXED, **(environment or {})},
        capture_output=True,
        text=True,
    )
