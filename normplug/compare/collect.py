"""Keep the runs of a study in one small file, from which its report can be made again."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normplug._report.files import write_file
from normplug.compare.sources import Record, find_records
from normplug.compare.variance import kept_variance

LOCAL = ("process",)  # keys that say something of one machine only
FOLDERS = re.compile(r"(?<![\w.~])~?/(?:[\w.+-]+/)*(?=[\w.+-])")  # of an absolute path


def collect(sources: Sequence[Path], path: Path) -> int:
    """Write all runs to `path`, a run a line, and return how many there are.

    Each is the content of its `result.json` without what is local to a machine: of absolute paths,
    only the last name stays. Its `run` is the name of its directory, its `variances` are a part of
    its `variance.csv`.

    Raises:
        OSError: a source cannot be read, or `path` cannot be written.
        ValueError: a `result.json` cannot be read.
    """
    records, unreadable = find_records(sources)
    for name, why in unreadable.items():
        raise ValueError(f"normplug.compare: {name} cannot be read: {why}. Delete it or repeat it.")
    lines = ",\n".join(json.dumps(_kept(record)) for record in records)
    write_file(path, f"[\n{lines}\n]\n")
    return len(records)


def _kept(record: Record) -> dict[str, Any]:
    values = {name: value for name, value in record.values.items() if name not in LOCAL}
    kept = {"run": record.name} | {name: _without_folders(value) for name, value in values.items()}
    if record.variances and (variances := kept_variance(record.variances)):
        kept["variances"] = variances
        kept.pop("input_variances", None)  # the last step of these
    return kept


def _without_folders(value: Any) -> Any:
    """A text or a list of texts, with the last name only of each absolute path in it."""
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value
