"""Run the tests that need no GPU under several versions of torch, and write a table of the results.

    python tests/versions                                  # every version, the whole suite
    python tests/versions --torch 2.11 -- tests/swap -x    # one version, some tests
    python tests/versions --use ENV --use OTHER_ENV        # virtual environments that exist

Each version gets a virtual environment under --home with the extra `test`, which is kept for the
next time. The exit status is 1 where a test fails, or an environment cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT)]

from normplug._report.files import write_file  # noqa: E402
from normplug._report.markdown import table  # noqa: E402

VERSIONS = ("2.6", "2.8", "2.11", "2.13", "newest")
HEADER = (
    "torch", "Triton", "torchvision", "numpy", "Python", "passed", "failed", "skipped", "minutes",
)  # fmt: skip
ASK = """
import json, platform, torch
from importlib import metadata, util
names = ("triton", "torchvision", "numpy")
others = [metadata.version(n) if util.find_spec(n) else "-" for n in names]
print(json.dumps([torch.__version__, *others, platform.python_version()]))
"""


class Row(NamedTuple):
    """One environment's results."""

    versions: Sequence[str]
    passed: int
    failed: int
    skipped: int
    seconds: float

    def cells(self) -> list[str]:
        """The cells of the table's row."""
        counts = map(str, (self.passed, self.failed, self.skipped))
        return [*self.versions, *counts, f"{self.seconds / 60:.1f}"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python tests/versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--torch", nargs="+", default=VERSIONS, metavar="VERSION", dest="versions")
    top.add_argument("--use", action="append", type=Path, metavar="ENV", help="in place of --torch")
    top.add_argument(
        "--home", type=Path, default=CHECKOUT / "build" / "versions", help="environment folder"
    )
    top.add_argument("-o", "--output", type=Path, metavar="FILE.md", help="default: print it")
    top.add_argument("pytest", nargs="*", help="after --: arguments of pytest; default: all tests")
    return top


def python_of(environment: Path) -> str:
    """The interpreter of a virtual environment."""
    return str(environment / "bin" / "python")


def requirements(version: str) -> list[str]:
    """What to install for a version of torch, beside the checkout."""
    if version == "newest":
        return ["torch"]
    torch = f"torch=={version}.*"
    # Triton's interpreter supports numpy 2.4 since Triton 3.7, which torch 2.12 brought.
    old = tuple(map(int, version.split("."))) < (2, 12)
    return [torch, "numpy<2.4"] if old else [torch]


def make(version: str, home: Path) -> Path:
    """The environment of a version of torch, made unless it exists.

    Raises:
        subprocess.CalledProcessError: pip finds no such version, or none for this Python.
    """
    environment = home / f"torch-{version}"
    if not environment.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = python_of(environment)
    pip = [python, "-m", "pip", "--quiet"]
    packages = [*requirements(version), f"{CHECKOUT}[test]"]
    subprocess.run([*pip, "install", "--upgrade", *packages], check=True)
    # A torchvision built for a GPU fails to import beside a CPU build of torch, and timm with it.
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        subprocess.run([*pip, "uninstall", "--yes", "torchvision", "timm"], check=True)
    return environment


def run(environment: Path, arguments: Sequence[str]) -> Row:
    """Run pytest in an environment, on the checkout."""
    python = python_of(environment)
    # The checkout, whatever normplug is installed in the environment; and no GPU.
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    asked = subprocess.run(
        [python, "-c", ASK], check=True, capture_output=True, text=True, env=variables
    )
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=CHECKOUT, env=variables)
        if not report.exists():
            raise RuntimeError(f"pytest ended without a report in {environment}")
        return read(json.loads(asked.stdout), report.read_text())


def read(versions: Sequence[str], report: str) -> Row:
    """The row of a report that pytest wrote in JUnit's format."""
    suite = next(ElementTree.fromstring(report).iter("testsuite"))
    tests, errors, failures, skipped = (
        int(suite.attrib[name]) for name in ("tests", "errors", "failures", "skipped")
    )
    failed = errors + failures
    return Row(versions, tests - failed - skipped, failed, skipped, float(suite.attrib["time"]))


def render(rows: Sequence[Row], arguments: Sequence[str]) -> str:
    """The page in Markdown."""
    what = " ".join(arguments) or "the whole suite"
    return (
        "# Versions of torch\n\n"
        f"`python tests/versions`, on the CPU, {what}, {datetime.now(timezone.utc):%Y-%m-%d}.\n\n"
        + table(HEADER, [row.cells() for row in rows], text=5)
        + "\nAll skip the tests that need a GPU. `-`: not installed, as Triton beside a CPU build\n"
        "of torch. Without Triton, the tests of the kernels are skipped; without torchvision,\n"
        "those of its models and of `train.py`. Triton before 3.7 interprets kernels only next\n"
        "to numpy before 2.4, so its rows have one. On Triton 3.2, two tests of synchronised\n"
        "BatchNorm are skipped: in its interpreter, a store of a single value ignores a mask\n"
        "that is False. On a GPU, normplug uses no kernels with Triton 3.2.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = parser().parse_args(argv)
    rows, failed = [], False
    for each in arguments.use or arguments.versions:
        try:
            environment = each if arguments.use else make(each, arguments.home)
            rows.append(run(environment, arguments.pytest))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"versions: {each}: {error}", file=sys.stderr)
            failed = True
        else:
            page = render(rows, arguments.pytest)
            if arguments.output:
                write_file(arguments.output, page)
    if rows and not arguments.output:
        print(page, end="")
    return int(failed or any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
