"""Run the tests that need no GPU under each minor version of torch, each with its Triton.

    python benchmarks/versions.py                        # every version, the whole suite
    python benchmarks/versions.py --torch 2.11 2.14 --jobs 1
    python benchmarks/versions.py --torch 2.11 -- tests/swap -x

Each version gets a virtual environment under --home with the extra `test`; one that exists is used
as it is. Rows of the whole suite go to docs/results/versions.json one by one, in place of an older
row of the same torch, and docs/versions.md is written from it. Other rows are only printed. The
exit status is 1 if a test fails or an environment cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

from normplug._files import write_file  # noqa: E402

VERSIONS = ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
RESULTS, PAGE = (
    CHECKOUT / "docs" / "results" / "versions.json",
    CHECKOUT / "docs" / "versions.md",
)
COLUMNS = ("torch", "triton", "torchvision", "numpy", "python", "date", "commit")
COLUMNS += ("passed", "failed", "skipped", "minutes")
STAMP = "import json; from normplug._files import stamp; print(json.dumps(stamp(False)))"
INTRODUCTION = """---
search: {exclude: true}
---

# Versions of torch

`python benchmarks/versions.py`: the whole suite, on the CPU ([rows](results/versions.json)).

"""
NOTES = """
All skip the tests that need a GPU. `-`: not installed. A CPU build of torch has no Triton.
Without Triton, the tests of the kernels are skipped; without torchvision, the tests of its models
and of `train.py`. Triton before 3.7 interprets kernels only next to numpy before 2.4, so its rows
have one. On Triton 3.2, two tests of synchronised BatchNorm are skipped: in its interpreter, a
store of a single value ignores a mask that is False. On a GPU, normplug uses no kernels with
Triton 3.2.

The failure with torch 2.7 is a test of exported convolutions, which passes since `0e52cce`.

Triton 3.8 refuses kernels that the other versions interpret. The tests refuse them in every
version, so one version finds the fault.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument(
        "--torch", nargs="+", default=VERSIONS, metavar="VERSION", dest="versions"
    )
    top.add_argument("--home", type=Path, default=CHECKOUT / "build" / "versions")
    top.add_argument("--jobs", metavar="N", default="auto", help="processes of pytest")
    top.add_argument(
        "pytest", nargs="*", help="after --: arguments of pytest; default: all tests"
    )
    return top


def requirements(version: str) -> list[str]:
    """What to install for a version of torch, next to the checkout."""
    # Triton's interpreter supports numpy 2.4 since Triton 3.7, which torch 2.12 brought.
    old = tuple(map(int, version.split("."))) < (2, 12)
    return [f"torch=={version}.*", *(["numpy<2.4"] if old else [])]


def python_of(version: str, home: Path) -> Path:
    """The interpreter of the environment of a version of torch, which is made unless it exists.

    Raises:
        subprocess.CalledProcessError: there is no such version, or none for this Python.
    """
    environment = home / f"torch-{version}"
    python = environment / "bin" / "python"
    if not python.exists():
        uv, this = shutil.which("uv"), sys.executable
        make = [uv, "venv", "--python", this] if uv else [this, "-m", "venv"]
        install = (
            [uv, "pip", "install", "--python"] if uv else [python, "-m", "pip", "install"]
        )
        packages = [
            *([python] if uv else []),
            *requirements(version),
            f"{CHECKOUT}[test]",
        ]
        try:
            subprocess.run([*make, environment], check=True)
            subprocess.run([*install, *packages], check=True)
        except (OSError, subprocess.CalledProcessError):
            shutil.rmtree(environment, ignore_errors=True)
            raise
    return python


def commit() -> str:
    """The commit of the checkout, with "-dirty" if tests or package differ from it."""
    git = ["git", "-C", str(CHECKOUT)]
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout
    tested = ("normplug", "tests", "configs", "train.py", "pyproject.toml")
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *tested]).returncode
    return head.strip() + ("-dirty" if changed else "")


def run(python: Path, jobs: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run pytest in an environment, on the checkout, without a GPU; return the row.

    Without arguments, it runs the whole suite, and then the kernels in Triton's interpreter.
    """
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    variables["NORMPLUG_COMMIT"] = commit()
    stamp = subprocess.check_output([python, "-c", STAMP], text=True, env=variables)
    command = [str(python), "-m", "pytest", "-q", "-n", jobs]
    total = Counter(counts(run_pytest([*command, *arguments], variables)))
    has_triton = json.loads(stamp).get("triton") is not None
    if not arguments and has_triton:
        interpreted = {**variables, "TRITON_INTERPRET": "1"}
        total.update(counts(run_pytest([*command, "tests/interpreted"], interpreted)))
    return {**json.loads(stamp), **total, "minutes": round(total["minutes"], 1)}


def run_pytest(command: Sequence[str], variables: dict[str, str]) -> str:
    """Run a command of pytest on the checkout; return its report in JUnit's format."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        reporting = [*command, f"--junitxml={report}"]
        subprocess.run(reporting, cwd=CHECKOUT, env=variables)
        if not report.exists():
            raise OSError(f"pytest ended without a report: {command[0]}")
        return report.read_text()


def counts(report: str) -> dict[str, float]:
    """The numbers of tests, and minutes, of a report that pytest wrote in JUnit's format."""
    suite = next(ElementTree.fromstring(report).iter("testsuite")).attrib
    skipped, failed = int(suite["skipped"]), int(suite["errors"]) + int(suite["failures"])
    passed = int(suite["tests"]) - failed - skipped
    minutes = round(float(suite["time"]) / 60, 1)
    return {"passed": passed, "failed": failed, "skipped": skipped, "minutes": minutes}


def merged(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, in place of an older one of the same torch, by version."""
    others = [other for other in rows if other["torch"] != row["torch"]]

    def version(row: dict[str, Any]) -> list[int]:
        return [int(number) for number in row["torch"].split("+")[0].split(".")]

    return sorted([*others, row], key=version)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page in Markdown."""
    cells = [[str(row.get(name, "-")) for name in COLUMNS] for row in rows]
    date, short = COLUMNS.index("date"), COLUMNS.index("commit")
    for line in cells:
        line[date], line[short] = line[date][:10], line[short][:7]
    rule = "|" + " --- |" * 7 + " ---: |" * 4
    lines = ["| " + " | ".join(line) + " |" for line in (COLUMNS, *cells)]
    return INTRODUCTION + "\n".join([lines[0], rule, *lines[1:]]) + "\n" + NOTES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = parser().parse_args(argv)
    failed = False
    for version in arguments.versions:
        try:
            python = python_of(version, arguments.home)
            row = run(python, arguments.jobs, arguments.pytest)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"versions: {version}: {error}", file=sys.stderr)
            failed = True
            continue
        failed |= row["failed"] > 0
        print(json.dumps(row))
        if not arguments.pytest:
            rows = merged(json.loads(RESULTS.read_text()), row)
            write_file(RESULTS, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            write_file(PAGE, page(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
