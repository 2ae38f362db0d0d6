"""Break the package in small ways, one at a time, and see whether its tests notice.

    python benchmarks/mutate.py --jobs 2            # every mutation, some minutes
    python benchmarks/mutate.py freeze "rms eps"    # mutations with one of these in their name
    python benchmarks/mutate.py --list              # names and files; nothing runs

The mutations are in `mutations.py`. Each replaces a text of a file, and names the tests nearest
to it. They are applied to copies of the checkout in temporary folders. First the tests run without
a mutation, and must pass. The result of a mutation is one of these:

    killed      a test fails, or the tests take longer than ten minutes
    survived    the tests pass: they would not notice this fault
    stale       the file does not have the text exactly once: change or remove the mutation
    unclear     pytest could not run the tests, for instance because an import fails

The exit status is 1 unless all mutations are killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mutations import MUTATIONS, Mutation

CHECKOUT = Path(__file__).resolve().parents[1]
LIMIT = 600  # seconds for the tests of a mutation
PASSED = 0  # the exit status of pytest
RESULTS = {PASSED: "survived", 1: "killed"}  # by the exit status: 1 if a test has failed


class Outcome(NamedTuple):
    """The result of a mutation.

    Attributes:
        mutation: the mutation.
        result: "killed", "survived", "stale" or "unclear".
        seconds: how long it took to copy the checkout and run the tests.
        output: the last lines of the tests' output.
    """

    mutation: Mutation
    result: str
    seconds: float
    output: str


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument(
        "words", nargs="*", help="run mutations whose name contains one of these"
    )
    top.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="mutations at a time"
    )
    top.add_argument(
        "--list", action="store_true", help="list the mutations, and run nothing"
    )
    return top


def chosen(mutations: Sequence[Mutation], words: Sequence[str]) -> list[Mutation]:
    """The mutations whose name contains one of the words; all without words."""
    if not words:
        return list(mutations)
    return [each for each in mutations if any(word in each.name for word in words)]


def is_stale(mutation: Mutation, checkout: Path) -> bool:
    """Whether the text of a mutation is not exactly once in its file."""
    file = checkout / mutation.file
    return not file.is_file() or file.read_text().count(mutation.old) != 1


def copy_of(checkout: Path, target: Path) -> None:
    """Copy the files of a checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    for name in done.stdout.split("\0"):
        source = checkout / name
        if name and source.is_file():
            copied = target / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copied)


def pytest(
    folder: Path,
    tests: Sequence[str],
    environment: Mapping[str, str],
    limit: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy in one process, up to the first failure; limit: in seconds."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    variables.setdefault("OMP_NUM_THREADS", "1")
    variables.update(environment)
    options = ["-n0", "-x", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )


def last_lines(output: str) -> str:
    """The end of the output of pytest."""
    return "\n".join(output.splitlines()[-15:])


def failures_without_mutation(mutations: Sequence[Mutation], checkout: Path) -> list[str]:
    """Run the tests of the mutations on an unchanged copy; return the output of failures."""
    tests_by_environment = defaultdict[tuple[tuple[str, str], ...], list[str]](list)
    for mutation in mutations:
        variables = tuple(sorted(mutation.environment.items()))
        tests_by_environment[variables].extend(mutation.tests)
    failures = []
    with TemporaryDirectory() as folder:
        copy_of(checkout, Path(folder))
        for variables, tests in tests_by_environment.items():
            without_repeats = list(dict.fromkeys(tests))
            done = pytest(Path(folder), without_repeats, dict(variables))
            if done.returncode != PASSED:
                failures.append(last_lines(done.stdout))
    return failures


def outcome_of(mutation: Mutation, checkout: Path) -> Outcome:
    """Apply a mutation to a copy of the checkout, and run its tests there."""
    if is_stale(mutation, checkout):
        return Outcome(mutation, "stale", 0.0, "")
    begun = time.perf_counter()
    with TemporaryDirectory() as folder:
        copy_of(checkout, Path(folder))
        file = Path(folder, mutation.file)
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        try:
            done = pytest(Path(folder), mutation.tests, mutation.environment, LIMIT)
        except subprocess.TimeoutExpired:
            result = "killed"
            output = f"the tests took longer than {LIMIT} s"
        else:
            result = RESULTS.get(done.returncode, "unclear")
            output = last_lines(done.stdout)
    return Outcome(mutation, result, time.perf_counter() - begun, output)


def print_row(name: str, file: str, result: str, seconds: str) -> None:
    """Print a row of the table."""
    print(f"{name:<50} {file:<42} {result:<9} {seconds:>7}", flush=True)


def print_list(mutations: Sequence[Mutation], checkout: Path) -> int:
    """Print the mutations without running them; the exit status, 1 if one is stale."""
    status = 0
    for mutation in mutations:
        result = ""
        if is_stale(mutation, checkout):
            result = "stale"
            status = 1
        print_row(mutation.name, mutation.file, result, "")
    return status


def run(mutations: Sequence[Mutation], checkout: Path, jobs: int) -> int:
    """Run the mutations, `jobs` at a time, and print a table; the exit status."""
    current = [mutation for mutation in mutations if not is_stale(mutation, checkout)]
    failures = failures_without_mutation(current, checkout)
    if failures:
        print("mutate: these tests fail without a mutation:", *failures, sep="\n")
        return 1
    print_row("mutation", "file", "result", "seconds")
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(partial(outcome_of, checkout=checkout), mutations):
            mutation = outcome.mutation
            seconds = f"{outcome.seconds:.1f}"
            print_row(mutation.name, mutation.file, outcome.result, seconds)
            if outcome.result == "unclear":
                print(outcome.output, flush=True)
            results.append(outcome.result)
    counts = [f"{results.count(result)} {result}" for result in dict.fromkeys(results)]
    print(f"{len(results)} mutations: {', '.join(counts)}")
    return int(any(result != "killed" for result in results))


def main(
    argv: Sequence[str] | None = None,
    mutations: Sequence[Mutation] = MUTATIONS,
    checkout: Path = CHECKOUT,
) -> int:
    """Run the command line on the mutations of a checkout; the exit status."""
    arguments = parser().parse_args(argv)
    selected = chosen(mutations, arguments.words)
    if not selected:
        print(
            f"mutate: no mutation is named {' or '.join(arguments.words)}",
            file=sys.stderr,
        )
        return 1
    if arguments.list:
        return print_list(selected, checkout)
    return run(selected, checkout, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
