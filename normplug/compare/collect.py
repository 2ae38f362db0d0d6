"""Collect the runs of a study in one small file, from which its report can be regenerated."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normplug._report.files import write_file
from normplug.compare.sources import Record, find_records, refuse_unreadable
from normplug.compare.variance import kept_variance

LOCAL = ("process",)  # keys that mean something on one machine only
FOLDERS = re.compile(r"(?<![\w.~])~?/(?:[\w.+-]+/)*(?=[\w.+-])")  # in an absolute path


def collect(sources: Sequence[Path], path: Path) -> int:
    """Write all runs to `path`, one per line, and return how many there are.

    Each is the content of its `result.json` without what is local to a machine: of absolute paths,
    only the last component stays. `run` is the name of its directory, and `variances` is a part of
    its `variance.csv`.

    Raises:
        OSError: a source cannot be read, or `path` cannot be written.
        ValueError: a `result.json` cannot be read.
    """
    records, unreadable = find_records(sources)
    refuse_unreadable(unreadable)
    lines = ",\n".join(json.dumps(_kept(record)) for record in records)
    write_file(path, f"[\n{lines}\n]\n")
    return len(records)


def _kept(record: Record) -> dict[str, Any]:
    values = {name: value for name, value in record.values.items() if name not in LOCAL}
    kept = {"run": record.name} | {name: _without_folders(value) for name, value in values.items()}
    if record.variances and (variances := kept_variance(record.variances)):
        kept["variances"] = variances
        kept.pop("input_variances", None)  # redundant: the last step of `variances`
    return kept


def _without_folders(value: Any) -> Any:
    """Reduce each absolute path in a text or a list of texts to its last component."""
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value
