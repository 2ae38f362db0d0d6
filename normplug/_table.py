"""Plain text tables, and how paths and counts are written in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Align the columns of a table; the last one is as long as its text.

    Args:
        rows: the header, then a row a line; all of one length.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def shown(path: str) -> str:
    """A module's path for people: that of the model itself is empty."""
    return path or "(the model itself)"


def counts(kinds: Counter[str]) -> str:
    """Write counts out, as in `3 BatchNorm2d, 1 LayerNorm`."""
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"
