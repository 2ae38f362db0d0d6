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

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *lines = self._cells()
        shown = _pandas().DataFrame(lines, columns=header).to_html(index=False)
        return shown + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a line for each row, and a column for each of their keys."""
        return _pandas().DataFrame(self.rows)

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


def _pandas() -> Any:
    with needs("normplug.bench", "bench"):
        import pandas
    return pandas


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
