"""Plain text tables, and how paths and counts are written in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")
# How many texts an error or a warning lists.
_MOST = 8


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """The rows of a report."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Text with aligned columns.

    Args:
        rows: the header, then the rows; all have the same number of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


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
