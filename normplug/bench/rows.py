"""Rows of results: flat dictionaries, which tell where they come from, as text, HTML and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normplug._extras import needs
from normplug._results import write_file
from normplug._table import table

Row = dict[str, Any]


class Rows(Sequence[Row]):
    """Rows of results; `print` them, or leave them at the end of a notebook's cell, for a table.

    Args:
        rows: flat dictionaries.
        columns: the columns to show: header -> (key, format).
        notes: sentences to print below the table.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        columns: Mapping[str, tuple[str, str]],
        notes: Iterable[str] = (),
    ) -> None:
        self.rows, self.columns, self.notes = list(rows), dict(columns), list(notes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        return "\n".join([table(self._cells()), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        header, *lines = [[html.escape(cell) for cell in line] for line in self._cells()]
        head = "".join(f"<th>{cell}</th>" for cell in header)
        body = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><tr>{head}</tr>{body}</table>{notes}"

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a line for each row, and a column for each of their keys."""
        return frame(self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        """The header and the rows; columns without any value are left out."""
        known = {key for row in self.rows for key, value in row.items() if value is not None}
        columns = {name: column for name, column in self.columns.items() if column[0] in known}
        cells = [
            tuple(
                "-" if row.get(key) is None else form.format(row[key])
                for key, form in columns.values()
            )
            for row in self.rows
        ]
        return [tuple(columns), *cells]


def frame(rows: Sequence[Row]) -> Any:
    """The rows as a `pandas.DataFrame`."""
    with needs("normplug.bench", "bench"):
        import pandas
    return pandas.DataFrame(rows)


def add_to_file(path: Path | None, rows: Iterable[Row]) -> None:
    """Append rows to a JSON file, a list of rows, which is created if absent; None for no file.

    Raises:
        ValueError: the file is not a list of rows; it is left as it is.
    """
    if path is None:
        return
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if not _are_rows(known):
        raise ValueError(f"{path} is not a list of rows. Write to another file.")
    lines = ",\n".join(f" {json.dumps(row)}" for row in [*known, *rows])
    write_file(path, f"[\n{lines}\n]\n")


def read_file(path: Path) -> list[Row]:
    """The rows of a JSON file.

    Files of normplug 0.2 and before are an object, with facts about all its rows: each row gets
    them.

    Raises:
        ValueError: the file cannot be read, or has no rows; the message says which.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    facts: Row = {}
    if isinstance(content, dict):
        facts = {key: value for key, value in content.items() if key not in ("rows", "versions")}
        facts |= content.get("versions", {})
        content = content.get("rows")
    if not _are_rows(content) or not content:
        raise ValueError(f"{path} has no rows of results.")
    return [_as_today({**facts, **row}) for row in content]


def _as_today(row: Row) -> Row:
    """The row with a shape as text, and medians where an older file has the best times."""
    if isinstance(row.get("shape"), list):
        row["shape"] = "x".join(map(str, row["shape"]))
    for key in [key for key in row if key.startswith("median_")]:
        name = key.removeprefix("median_")
        row[f"best_{name}"], row[name] = row[name], row.pop(key)
    return row


def _are_rows(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(row, dict) for row in content)
