"""Plain text tables, and how paths and counts are written in them."""

from __future__ import annotations

import html
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from normplug._checks import needs

Row = TypeVar("Row")
_WIDTH = 120  # columns of a printed report, unless the terminal is narrower
_NARROW = 80  # the fewest that a report is made for
_wrap = partial(textwrap.wrap, break_on_hyphens=False)
_NUMBER = re.compile(r"(?:0|[1-9]\d*)(?=\.(?!\.)|$)")  # ends a name; not those of {0..79}
_MOST = 8  # texts that an error or a warning lists


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The rows of a report; `print` them, or leave them at the end of a notebook's cell."""

    rows: tuple[Row, ...]
    row_type: ClassVar[Any] = None  # a NamedTuple, unless a class has its own `columns`

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> dict[str, list[str]]:
        """The cells of each column; the first has the paths. By default, the fields of the rows."""
        rows: Any = self.rows
        cells = [(shown(path), *map(_cell, rest)) for path, *rest in rows]
        return {
            name: [row[i] for row in cells]
            for i, name in enumerate(self.row_type._fields)
        }

    def summary(self) -> str:
        """One line below the table."""
        raise NotImplementedError

    def __str__(self) -> str:
        columns = self.columns()
        rows = folded(list(zip(*columns.values(), strict=True)))
        width = _columns_of_output()
        summary = "\n".join(_wrap(self.summary(), width))
        return f"{table([tuple(columns), *rows], width)}\n{summary}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of the table, with a line for each norm."""
        with needs("to_pandas", "bench"):
            import pandas
        return pandas.DataFrame(self.columns())


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Write three rows or more that differ in a number as one, such as `layers.{0..79}.norm x80`.

    The path is the first cell; the others may contain it. The last number of a path is folded
    first.
    """
    groups: list[tuple[Any, int]] = [(cells, 1) for cells in rows]
    dots = [path.count(".") for path, *_ in rows]
    for place in range(max(dots, default=-1), -1, -1):
        groups = _fold(groups, place)
    lines = []
    for (path, *cells), count in groups:
        lines.append((f"{path} x{count}" if count > 1 else path, *cells))
    return lines


@dataclass
class _Run:
    """Groups of rows that differ in one number, which rises by one."""

    low: int
    blanks: tuple[str, ...]  # their cells, with {} for the number
    groups: list[int] = field(default_factory=list)


def _fold(groups: list[tuple[Any, int]], place: int) -> list[tuple[Any, int]]:
    """Fold one number of the paths, by its place; groups: cells, and how many rows they are."""
    runs: list[_Run] = []
    latest: dict[Any, _Run] = {}
    for index, (cells, count) in enumerate(groups):
        numbers = list(_NUMBER.finditer(cells[0]))
        if place >= len(numbers):
            continue
        number = int(numbers[place][0])
        blanks = _without(numbers[place], cells)
        run = latest.get((count, blanks))
        if run is None or number != run.low + len(run.groups):
            run = _Run(number, blanks)
            runs.append(run)
            latest[count, blanks] = run
        run.groups.append(index)
    result = dict(enumerate(groups))
    for run in runs:
        size = len(run.groups)
        if size < 3:
            continue
        span = f"{{{run.low}..{run.low + size - 1}}}"
        first, *others = run.groups
        joined = tuple(cell.replace("{}", span) for cell in run.blanks)
        result[first] = joined, size * groups[first][1]
        for index in others:
            del result[index]
    return list(result.values())


def _without(number: re.Match[str], cells: Sequence[str]) -> tuple[str, ...]:
    """Cells with {} for a number of the first one, wherever they have the path up to it."""
    head = number.string[: number.end()]
    blank = number.string[: number.start()] + "{}"
    pattern = rf"(?<![\w.]){re.escape(head)}(?!\w)"
    return tuple(re.sub(pattern, blank, cell) if head in cell else cell for cell in cells)


def _columns_of_output() -> int:
    """The columns of the terminal, within limits; 120 where the output goes elsewhere."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # no file, no terminal, or it is closed
        return _WIDTH
    return min(max(columns, _NARROW), _WIDTH)


def _blocks(rows: Sequence[tuple[str, ...]], width: int) -> str:
    """Text with a line for each cell, below the first one of its row."""
    (_, *names), *body = rows
    start = max(map(len, names)) + 4
    lines = []
    for first, *cells in body:
        lines.append(first)
        for name, cell in zip(names, cells, strict=True):
            head = f"  {name}".ljust(start)
            lines += _wrap(
                cell, width, initial_indent=head, subsequent_indent=" " * start
            )
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, ...]], total: int | None = None) -> str:
    """Text with aligned columns, the header first; a long last cell takes several lines.

    With a total width, the cells stand below each other if the columns have no room.
    """
    *widths, longest = (max(map(len, column)) for column in zip(*rows, strict=True))
    start = sum(width + 2 for width in widths)
    if total is not None and total < _WIDTH and start + min(longest, 24) > total:
        return _blocks(rows, total)
    total = total or _WIDTH
    # Whether the last cell has no room next to the others.
    below = longest > 24 > total - start
    indent = " " * (4 if below else start)
    width = total if below else max(total, start + 24)
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(size + 2) for cell, size in zip(cells, widths, strict=True)]
        line = "".join(padded)
        first = indent if below else line
        parts = _wrap(last, width, initial_indent=first, subsequent_indent=indent)
        if below or not parts:
            lines.append(line.rstrip())
        lines += parts
    return "\n".join(lines)


def shown(path: str) -> str:
    """A module's path as it is printed; the path of the model itself is empty."""
    return path or "(the model itself)"


def some(texts: Sequence[str], separator: str = ", ") -> str:
    """The first of a list of texts, and how many there are if that is not all."""
    more = [f"... ({len(texts)} in all)"] if len(texts) > _MOST else []
    return separator.join([*texts[:_MOST], *more])


def counts(kinds: Counter[str]) -> str:
    """Counts as text, such as `3 BatchNorm2d, 1 LayerNorm`; "none" without any."""
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"
