"""Find the records of runs, in directories with `result.json` files and in collected files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normplug._report.run_files import REFUSAL, RESULT, VARIANCE


class Record(NamedTuple):
    """The content of one `result.json`.

    Attributes:
        name: the run's directory, relative to where it was found.
        file: the name of the file in messages; in a collected file, the `name`.
        values: the content of the file. In a collected file, it may include `variances`.
        variances: `variance.csv` beside the file; None if there is none.
    """

    name: str
    file: str
    values: dict[str, Any]
    variances: Path | None = None


def find_records(sources: Sequence[Path]) -> tuple[list[Record], dict[str, str]]:
    """Return the records of all sources, and file -> reason for those that could not be read.

    Args:
        sources: each is a directory that is searched at any depth for `result.json`, or a file
            that `python -m normplug.compare --collect` wrote.

    Raises:
        FileNotFoundError: a source does not exist.
        ValueError: a directory holds no `result.json`; a file holds no list of runs.
    """
    records: list[Record] = []
    unreadable: dict[str, str] = {}
    for source in sources:
        if source.is_file():
            records += _in_file(source)
            continue
        for path in _in_directory(source):
            name, file = (p.relative_to(source).as_posix() for p in (path.parent, path))
            variances = path.with_name(VARIANCE)
            try:
                found = variances if variances.is_file() else None
                records.append(Record(name, file, read_result(path), found))
            except (OSError, ValueError) as error:
                unreadable[file] = str(error)
    return records, unreadable


def refuse_unreadable(unreadable: Mapping[str, str]) -> None:
    """Raise for the first unreadable file.

    Raises:
        ValueError: there is one.
    """
    for name, why in unreadable.items():
        raise ValueError(
            f"normplug.compare: {name} cannot be read: {why}. Delete it, or repeat the run."
        )


def read_result(path: Path) -> dict[str, Any]:
    """Read a `result.json`; a run that the latest sweep refused to use counts as failed."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError("is not a JSON object")
    if (refusal := path.with_name(REFUSAL)).is_file():
        values |= {"status": "failed", "error": refusal.read_text(encoding="utf-8")}
    return values


def _in_directory(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"normplug.compare: {directory} is neither a directory nor a file. Give the directory "
            "that holds the runs of a sweep, or a file that --collect wrote."
        )
    paths = sorted(directory.rglob(RESULT))
    if not paths:
        raise ValueError(
            f"normplug.compare: no result.json at any depth under {directory}. train.py writes "
            "one into the directory of each run: give that directory, or one above it."
        )
    return paths


def _in_file(path: Path) -> Iterator[Record]:
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"normplug.compare: {path} is not JSON: {error}.") from None
    if not (isinstance(runs, list) and all(isinstance(run, dict) for run in runs)):
        raise ValueError(
            f"normplug.compare: {path} does not hold a list of runs. Give a file that "
            "`python -m normplug.compare RUNS --collect FILE` wrote, or a directory of runs."
        )
    for number, run in enumerate(runs):
        name = str(run.get("run") or f"run {number}")
        yield Record(name, name, run)
