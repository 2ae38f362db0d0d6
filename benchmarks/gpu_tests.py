"""Run the tests that need a GPU, and write how many passed: a row for each folder of tests.

    python benchmarks/gpu_tests.py --json docs/results/gpu_tests_h200.json
    NORMPLUG_NATIVE=0 python benchmarks/gpu_tests.py --tests tests/kernels tests/modules

`NORMPLUG_NATIVE=0` runs the calls through Python instead of C++. `minutes` is the time of a
folder's tests, which several processes share. The exit status is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from normplug._files import stamp
from normplug.bench.rows import Row, Rows, report
from normplug.bench.timing import ready
from versions import run_pytest

COLUMNS = ("tests", "native", "passed", "failed", "skipped", "minutes")


def folder_of(module: str) -> str:
    """The folder of a test by its module or class: `tests.fuse.test_models` -> `tests/fuse`.

    A module outside a folder stands for itself: `tests.test_gpu` -> `tests/test_gpu`.
    """
    return "/".join(module.split(".")[:2])


def outcome_of(case: ElementTree.Element) -> str:
    """Whether a test of a report in JUnit's format has passed, failed or was skipped."""
    found = {child.tag for child in case}
    if found & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in found else "passed"


def counted(text: str) -> Iterator[Row]:
    """A row for each folder of a report in JUnit's format: its numbers of tests, and minutes."""
    outcomes: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for case in ElementTree.fromstring(text).iter("testcase"):
        # A module that is skipped as a whole has no class: its name is the module's.
        folder = folder_of(case.attrib["classname"] or case.attrib["name"])
        outcomes.setdefault(folder, Counter())[outcome_of(case)] += 1
        seconds[folder] += float(case.attrib["time"])
    for folder, numbers in sorted(outcomes.items()):
        counts = {name: numbers[name] for name in ("passed", "failed", "skipped")}
        yield {"tests": folder, **counts, "minutes": round(seconds[folder] / 60, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH")
    parser.add_argument("--jobs", default="auto", metavar="N", help="processes of pytest")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file"
    )
    a = parser.parse_args(argv)
    ready("cuda")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", a.jobs, *a.tests]
    found = counted(run_pytest(command, dict(os.environ)))
    # The suite asks for C++ by itself, and fails where it cannot be compiled.
    native = "Python" if os.environ.get("NORMPLUG_NATIVE") == "0" else "C++"
    rows = [{**row, "native": native, **stamp(True)} for row in found]
    report([Rows(rows, COLUMNS, [])], a.json)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
