"""Plain text tables, and how paths and counts are written in them."""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from normplug._checks import needs

Row = TypeVar("Row")
_WIDTH = 120  # columns of a printed report
_wrap = partial(textwrap.wrap, break_on_hyphens=False)
_NUMBER = re.compile(r"(?:0|[1-9]\d*)(?=\.(?!\.)|$)")  # ends a name; not those of {0..79}
_MOST = 8  # texts that an error or a warning lists


@dataclass(frozen=True)
class Rows(Generic[Row]):
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
        rows = folded([*zip(*columns.values(), strict=True)])
        return f"{table([tuple(columns), *rows])}\n" + "\n".join(
            _wrap(self.summary(), _WIDTH)
        )

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

    The path is the first cell; the others may contain it. What saves most rows is folded first.
    """
    found = [(cells, 1) for cells in rows]
    places = range(max((path.count(".") + 1 for path, *_ in rows), default=0))
    while len(
        best := min((_fold(found, at) for at in places), key=len, default=[])
    ) < len(found):
        found = best
    return [
        (f"{path} x{count}" if count > 1 else path, *cells)
        for (path, *cells), count in found
    ]


def _fold(found: list[tuple[Any, int]], place: int) -> list[tuple[Any, int]]:
    """Fold one number of the paths, by its place; found: the cells, and how many rows they are."""
    alike: dict[
        Any, list[tuple[int, int]]
    ] = {}  # cells without a number -> (number, row)
    for index, (cells, count) in enumerate(found):
        numbers = [*_NUMBER.finditer(cells[0])]
        if place < len(numbers):
            head, number = cells[0][: numbers[place].end()], numbers[place][0]
            blank, pattern = (
                head.removesuffix(number) + "{}",
                rf"(?<![\w.]){re.escape(head)}(?!\w)",
            )
            key = (
                count,
                *(
                    re.sub(pattern, blank, cell) if head in cell else cell
                    for cell in cells
                ),
            )
            alike.setdefault(key, []).append((int(number), index))
    joined = dict(enumerate(found))
    for (count, *blanks), members in alike.items():
        for _, run in itertools.groupby(
            enumerate(members), lambda each: each[1][0] - each[0]
        ):
            (_, (low, first)), *others = run
            if len(others) >= 2:
                span = f"{{{low}..{low + len(others)}}}"
                cells = tuple(cell.replace("{}", span) for cell in blanks)
                joined[first] = cells, count * (1 + len(others))
                for _, (_, index) in others:
                    del joined[index]
    return list(joined.values())


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Text with aligned columns, the header first; a long last cell takes several lines."""
    *widths, longest = (max(map(len, column)) for column in zip(*rows, strict=True))
    start = sum(width + 2 for width in widths)
    below = longest > 24 > _WIDTH - start  # the last cell has no room beside the others
    left, width = " " * (4 if below else start), max(_WIDTH, 0 if below else start + 24)
    lines = []
    for *cells, last in rows:
        line = "".join(
            cell.ljust(size + 2) for cell, size in zip(cells, widths, strict=True)
        )
        parts = _wrap(
            last, width, initial_indent=left if below else line, subsequent_indent=left
        )
        lines += [line.rstrip()] * (below or not parts) + parts
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
