"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1, padded: bool = False
) -> str:
    """A table that ends in a newline; a `|` in a cell becomes `/`.

    Args:
        header: the names of the columns.
        rows: the cells of each line, as many as the header has.
        text: how many columns, from the left, hold text; the others hold numbers, right-aligned.
        padded: pad the cells of a column to one width, so that the table also reads well as text.
    """
    lines = [[cell.replace("|", "/") for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if not padded:
        widths = [0] * len(header)

    def join(cells: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |\n"

    left, right = ("-{}-", "-{}:") if padded else (" --- ", " ---: ")
    rules = [
        (left if column < text else right).format("-" * width)
        for column, width in enumerate(widths)
    ]
    return f"{join(lines[0])}|{'|'.join(rules)}|\n{''.join(map(join, lines[1:]))}"
