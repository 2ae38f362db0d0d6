"""Rows of results: flat dictionaries that say where they come from, and how they are shown."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normplug._checks import needs
from normplug._files import write_file
from normplug._table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
ORIGIN = "{device}, torch {torch}, {date:.10}, commit {commit}"
# Markers and dashes of providers in their order. The colours are in `_pictures`.
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.")


class Rows(list[Row]):
    """Rows of results; `print` them, or leave them at the end of a notebook's cell, for a table.

    The table shows those of the `columns` that have a value; below it are the `notes`, sentences.

    Args:
        rows: a dictionary from column to value for each row.
        columns: the columns of the table, in order.
        notes: sentences below the table.
    """

    def __init__(
        self, rows: Iterable[Row], columns: Sequence[str], notes: Iterable[str] = ()
    ) -> None:
        super().__init__(rows)
        self.columns, self.notes = columns, list(notes)

    def __str__(self) -> str:
        keys = [
            key for key in self.columns if any(row.get(key) is not None for row in self)
        ]
        lines = [
            tuple(keys),
            *(tuple(cell(row.get(key)) for key in keys) for row in self),
        ]
        return "\n".join([table(lines) if keys else "no rows", *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a line for each row, and a column for each key."""
        with needs("normplug.bench", "bench"):
            import pandas
        return pandas.DataFrame(list(self))


def cell(value: Any) -> str:
    """A value as the text of a table's cell."""
    if isinstance(value, float) and not math.isnan(value):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None or value != value else str(value)


def read_file(path: Path) -> list[Row]:
    """The rows of a JSON file; a ValueError if it has anything else."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a list of rows.")
    return rows


def report(found: Iterable[Rows], path: Path | None) -> None:
    """Print rows as they are measured, and append them to a JSON file, if any."""
    for rows in found:
        print(rows, flush=True)
        add_to_file(path, rows)


def add_to_file(path: Path | None, rows: Iterable[Row]) -> None:
    """Append rows to a JSON file, which is created if absent; None for no file."""
    if path is not None:
        known = read_file(path) if path.exists() else []
        lines = ",\n".join(f" {json.dumps(row)}" for row in [*known, *rows])
        write_file(path, f"[\n{lines}\n]\n")


def draw(rows: Sequence[Row], path: Path, title: str | None = None) -> None:
    """Plot the median GB/s of each provider over the width, by operation, dtype and direction."""
    from matplotlib import rc_context

    from normplug._pictures import STYLE, save

    with rc_context(STYLE):
        save(_figure(rows, title), path)


def _figure(rows: Sequence[Row], title: str | None) -> Figure:
    """A panel for each operation, dtype and direction."""
    import pandas
    from matplotlib.figure import Figure

    from normplug._pictures import GREY, WIDTH, colours_of, origin_text, title_text

    found = pandas.DataFrame(
        [row for row in rows if row.get("layout") == "rows" and "gbps" in row]
    )
    if found.empty:
        raise ValueError(
            "it has no rows with the GB/s of LayerNorm or RMSNorm: `op NAME` and `sweep` "
            "write them"
        )
    found[["rows", "width"]] = found["shape"].str.rsplit("x", n=1, expand=True)
    found = found.astype({"width": int})
    names = found["provider"].unique()
    colours = colours_of(names)
    panels = list(found.groupby(["op", "rows", "dtype", "direction"], sort=False))
    height = -(-len(panels) // 2)
    figure = Figure((WIDTH, 1 + 2.6 * height), layout="constrained")
    grid = figure.subplots(
        height, min(len(panels), 2), sharex=True, sharey=True, squeeze=False
    )
    for axes, (panel, part) in zip(grid.flat, panels, strict=False):
        speeds = part.pivot_table("gbps", "width", "provider", aggfunc="median")
        for name, style in zip(names, cycle(STYLES)):  # noqa: B905
            if name in speeds:
                of_name = speeds[name].dropna()
                look = {"color": colours[name], "label": name, "markersize": 4}
                axes.plot(of_name.index, of_name, style, **look)
        axes.set_title("{}, {} rows, {}, {}".format(*panel))
        axes.set_xscale("log", base=2)
        axes.grid(visible=True)
        if "copy_gbps" in part:
            copy = part["copy_gbps"].iloc[0]
            axes.axhline(copy, color=GREY, linestyle="--", label="a copy")
        axes.set(xlabel="width of a row", ylabel="median GB/s, higher is better")
        axes.label_outer()
    # After all panels, which share the axis: this ends its scaling.
    grid.flat[0].set_ylim(bottom=0)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    handles = grid[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(names) + 1)
    figure.suptitle(title_text(title or origin_text(rows)))
    return figure
