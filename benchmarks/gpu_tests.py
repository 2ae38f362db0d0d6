"""Run the tests that need a GPU, and write how many passed: a row for each folder of tests.

    python benchmarks/gpu_tests.py --json docs/results/gpu_tests_h200.json
    NORMPLUG_NATIVE=0 python benchmarks/gpu_tests.py --tests tests/kernels tests/modules

`NORMPLUG_NATIVE=0` runs the calls through Python instead of C++. A row is written as soon as its
folder is done. The exit status is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import normplug
from normplug._files import stamp
from normplug.bench.rows import Row, Rows, report
from normplug.bench.timing import ready
from versions import run_pytest

CHECKOUT = Path(__file__).resolve().parents[1]
COLUMNS = ("tests", "native", "passed", "failed", "skipped", "minutes")


def folders() -> list[str]:
    """The folders of tests and the test modules outside a folder, as paths from the checkout."""
    tests = CHECKOUT / "tests"
    inner = {path.parent for path in tests.glob("*/test_*.py")}
    paths = [*sorted(inner), *sorted(tests.glob("test_*.py"))]
    return [str(path.relative_to(CHECKOUT)) for path in paths]


def measure(tests: Sequence[str], jobs: str) -> Iterator[Row]:
    """A row for each of these paths: the numbers of its tests, and the minutes they took."""
    for path in tests:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", jobs, path]
        counts = run_pytest(command, dict(os.environ))
        if counts["passed"] + counts["failed"] + counts["skipped"] == 0:
            continue  # no test of this path needs a GPU
        native = normplug.status().way
        yield {"tests": path, "native": native, **counts, **stamp(True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="+", default=folders(), metavar="PATH")
    parser.add_argument("--jobs", default="auto", metavar="N", help="processes of pytest")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file"
    )
    a = parser.parse_args(argv)
    ready("cuda")
    failed = 0
    for row in measure(a.tests, a.jobs):
        report([Rows([row], COLUMNS, [])], a.json)
        failed += row["failed"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
