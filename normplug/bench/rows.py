"""Rows of results: flat dictionaries, which tell where they come from, as text, HTML and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normplug._checks import needs
from normplug._results import write_file
from normplug._table import table

Row = dict[str, Any]


class Rows(list[Row]):
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
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(rows)
        self.columns, self.notes = columns, notes

    def __str__(self) -> str:
        return "\n".join([table(self._cells()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = ([f"<td>{html.escape(cell)}</td>" for cell in line] for line in self._cells())
        body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
        return f"<table>{body}</table>" + "".join(f"<p>{html.escape(n)}</p>" for n in self.notes)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a line for each row, and a column for each of their keys."""
        with needs("normplug.bench", "bench"):
            import pandas
        return pandas.DataFrame(list(self))

    def _cells(self) -> list[tuple[str, ...]]:
        """The header and the rows; columns without any value are left out."""
        shown = {
            header: ["-" if row.get(key) is None else form.format(row[key]) for row in self]
            for header, (key, form) in self.columns.items()
            if any(row.get(key) is not None for row in self)
        }
        return [tuple(shown), *zip(*shown.values(), strict=True)]


def read_file(path: Path) -> list[Row]:
    """The rows of a JSON file.

    Raises:
        ValueError: the file is not a list of rows.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a list of rows.")
    return rows


def add_to_file(path: Path | None, rows: Iterable[Row]) -> None:
    """Append rows to a JSON file, which is created if absent; None for no file.

    Raises:
        ValueError: the file is not a list of rows; it is left as it is.
    """
    if path is not None:
        known = read_file(path) if path.exists() else []
        lines = ",\n".join(f" {json.dumps(row)}" for row in [*known, *rows])
        write_file(path, f"[\n{lines}\n]\n")
