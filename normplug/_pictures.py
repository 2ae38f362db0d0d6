"""How every picture looks: a colour for each arm, and grey text that reads on any page."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from normplug._files import replace_file

Drawn = TypeVar("Drawn")

UNBROKEN = "\N{NO-BREAK SPACE}"  # where a line of a title must not end
WIDTH = 7.5  # inches of every picture: a page shows about 93 of its pixels for an inch
DPI = 150
# Pictures have no background. This grey has a contrast of 4 with white and with dark pages.
GREY = "#7d7d7d"
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
    "savefig.transparent": False,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": "auto",
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "xtick.labelcolor": "inherit",
    "ytick.color": GREY,
    "ytick.labelcolor": "inherit",
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "hatch.color": GREY,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "font.size": 9,
    "figure.titlesize": "medium",
}

EAGER = "#8c8c8c"
NORMPLUG = "#e6761b"
COMPILE = "#3b82d0"
NORMPLUG_COMPILE = "#0f9d8a"
NORMPLUG_PYTHON = "#efb07a"
# A colour for each arm, in every picture. The names in a line are of one arm.
COLOURS = {
    **dict.fromkeys(("eager", "baseline", "baseline-eager"), EAGER),
    **dict.fromkeys(
        ("normplug", "swap+fuse", "standard", "standard-fused-eager"), NORMPLUG
    ),
    **dict.fromkeys(("compile", "torch.compile", "baseline-compiled"), COMPILE),
    **dict.fromkeys(
        ("swap+fuse+compile", "normplug and torch.compile", "standard-fused-compiled"),
        NORMPLUG_COMPILE,
    ),
    **dict.fromkeys(
        ("swap", "normplug-python", "normplug, through Python"), NORMPLUG_PYTHON
    ),
    **dict.fromkeys(("normplug, CUDA graphs", "standard-fused-graph"), "#b5541c"),
    "baseline-graph": "#5f6b7a",
    **dict.fromkeys(("liger", "Liger-Kernel"), "#3c9a5f"),
    **dict.fromkeys(("quack", "QuACK"), "#b0306a"),
    **dict.fromkeys(("flaggems", "FlagGems"), "#a9744f"),
    "golden": "#8e5bc0",
    # Target variances, from blue through green to red.
    "0.0625": "#5a8fe6",
    "0.125": "#1aa3b8",
    "0.25": "#2fa84f",
    "0.5": "#9aa52b",
    "1.5": "#d6453d",
    "2.0": "#a3324a",
    # Arms of the ResNet-18 that change the start, the biases or the head.
    "standard-gamma0_0.786": "#d65a9e",
    "standard-bias_4": "#7c8ce8",
    "standard-bias_16": "#4254c5",
    "standard-bias_and_head": "#b8860b",
    "standard-head": "#d983b5",
    "standard-gamma0_0.1-slow_weights": "#8a5a33",
    # Arms of the GPTs.
    "inverse_depth": "#2c8c99",
    "inverse_depth-scaled": "#c9a227",
    "mean_inverse_depth": "#8fa33b",
    "reversed_depth": "#4e79c8",
    "standard-gamma0_inverse_depth": "#c2558a",
    "standard-scaled": "#84513a",
}
ALIASES = {"2": "2.0", "standard-bias_4.0": "standard-bias_4"}
ALIASES |= {"standard-bias_16.0": "standard-bias_16"}
# For arms without a colour of their own: each arm's name picks one, so it keeps it.
SPARE = (
    "#008f6b",
    "#c9679b",
    "#cf5a1a",
    "#4f9fd0",
    "#7f7a1f",
    "#9c4f7a",
    "#6f6fd0",
    "#5f9a3a",
    "#b59a1f",
    "#c05050",
    "#3f8f9f",
    "#9a70b0",
)


def known(name: str) -> str:
    """The name of an arm as it is in `COLOURS`, if it is there."""
    return ALIASES.get(name, name.replace(" + ", "+"))


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """The colour of each arm or provider.

    A name in `COLOURS` has that colour in every picture. Another name has the one of `SPARE` that
    its checksum picks, or the next one that is free. Two names that are not of one arm differ.
    """
    colours = {}
    others = []
    for name in dict.fromkeys(names):
        if known(name) in COLOURS:
            colours[name] = COLOURS[known(name)]
        else:
            others.append(name)
    more = np.linspace(0.1, 0.9, max(len(others) - len(SPARE), 0))
    free = [*SPARE, *map(to_hex, colormaps["turbo"](more))]
    taken: set[int] = set()
    for name in sorted(others):
        slot = crc32(name.encode()) % len(SPARE)
        while slot in taken:
            slot = (slot + 1) % len(free)
        taken.add(slot)
        colours[name] = free[slot]
    return colours


def short_commit(commit: str) -> str:
    """A commit's first seven digits, with "-dirty" if it has that."""
    digits, dash, rest = commit.partition("-")
    return f"{digits[:7]}{dash}{rest}" if digits != "unknown" else commit


def shortest(names: set[str]) -> set[str]:
    """The names without those that only add details to another, as "H100 80GB" does to "H100"."""
    return {
        name
        for name in names
        if not any(name != other and name.startswith(other) for other in names)
    }


def origin_text(rows: Iterable[Mapping[str, Any]], *packages: str) -> str:
    """Where results come from, in words: device, versions, commits and days, if they are known.

    Each row has the keys of `normplug._files.stamp`. `packages` are named after torch, triton and
    normplug. `title_text` breaks its lines between the parts only.
    """
    rows = list(rows)
    parts = []
    for key in ("device", "torch", "triton", "normplug", *packages, "commit"):
        found = {str(row[key]) for row in rows if row.get(key)} - {"unknown"}
        if key == "commit":
            found = set(map(short_commit, found))
        found = shortest(found)
        if found:
            name = "" if key == "device" else f"{key} "
            parts.append(f"{name}{' or '.join(sorted(found))}".replace(" ", UNBROKEN))
    days = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    if days:
        parts.append(f"{UNBROKEN}to{UNBROKEN}".join(dict.fromkeys((days[0], days[-1]))))
    return ", ".join(parts)


def title_text(title: str) -> str:
    """The lines of a title, broken where they are wider than a picture."""
    lines = [
        textwrap.wrap(line, 105, break_on_hyphens=False) for line in title.split("\n")
    ]
    return "\n".join(part for parts in lines for part in parts).replace(UNBROKEN, " ")


def styled(draw: Callable[..., Drawn]) -> Callable[..., Drawn]:
    """Make a function draw in `STYLE`, whatever matplotlib is set to."""

    @functools.wraps(draw)
    def wrapped(*args: Any, **options: Any) -> Drawn:
        with rc_context(STYLE):
            return draw(*args, **options)

    return wrapped


@styled
def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a PNG file, and return its path."""
    with replace_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)
    return path
