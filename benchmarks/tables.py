"""Write the documentation's tables and pictures of the results in docs/results.

python benchmarks/tables.py                       # all pages and pictures
python benchmarks/tables.py FILE.json             # print the tables of a file
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from normplug._results import write_file
from normplug.bench import show
from normplug.bench.rows import Row, frame, read_file

DOCS = Path(__file__).parents[1] / "docs"
# Shapes that are so small that the host dominates.
SMALL = {"32x128", "128x512", "8x16x8x8", "32x64x14x14", "32x64x28x28", "128x64x32x32"}
SMALL |= {"64x512x7x7", "512x256", "4096x256"}
PACKAGES = ("torch", "triton", "cuda", "python", "normplug", "torchvision", "transformers")
PACKAGES += ("diffusers", "liger_kernel", "liger-kernel", "flag_gems", "quack-kernels", "timm")
CALL = ("op", "direction", "layout", "shape", "dtype")
CASE = ("model", "batch")
NEAR, NEAR_DTYPES = 1e-7, ("float32", "float64")  # differences from torch that are expected
PEERS = ("eager", "compile", "liger")  # arms of others
PAIRS = [  # arms whose training steps are compared
    ("swap", "eager"),
    *(("swap+fuse", peer) for peer in PEERS),
    ("swap+fuse+compile", "compile"),
    ("swap+fuse+graph", "eager+graph"),
    ("no-norm", "eager"),
]
Time = Callable[[Row], Any]


# The table's caption, the field of a row, and the format of a cell.
STEPS = (
    ("Median time of a training step, and samples a second", "ms", "{0:.2f} ms, {1:.0f}/s"),
    ("Best time of a step, ms", "best_ms", "{0:.2f}"),
    ("Time in which the GPU is busy in a step, ms", "gpu_ms", "{0:.2f}"),
    ("The host's time for a step, ms", "host_ms", "{0:.2f}"),
    ("Time of the first step, with no compiled kernel on disk, s", "first_step_s", "{0:.1f}"),
    ("Peak memory of a step, GiB", "peak_gib", "{0:.2f}"),
)
# The name of a picture -> its file of results, and its operations if these are not all.
PICTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "models_h100": ("models_h100", ()),
    "batch_norm_h100": ("kernels_h100", ("bn", "bn_relu", "bn_add_relu")),
    "layer_norm_h100": ("layer_norm_h100", ("ln",)),
    "rms_norm_h100": ("families_h100", ("rms", "add_rms")),
    "group_norm_h100": ("families_h100", ("gn", "gn_silu", "in3d")),
    "host_h100": ("host_h100", ()),
}


def render(rows: Sequence[Row]) -> str:
    """The tables of a file of results of any of the scripts."""
    if "arm" not in rows[0]:
        return _kernels(rows) if "floor_passes" in rows[0] else show.render(rows)
    parts = [_training(rows), *_steps(rows)]
    if profiled := [row for row in rows if row.get("groups_ms")]:
        parts += ["GPU time of a training step by groups of kernels, ms:\n", _profile(profiled)]
    return "\n".join(parts)


def _kernels(rows: Sequence[Row]) -> str:
    floors: dict[str, dict[str, str]] = {}
    for row in rows:
        by_direction = floors.setdefault(row["op"], {})
        by_direction[row["direction"]] = f"{row['direction']} {row['floor_passes']}P"
    passes = "; ".join(f"{op}: {', '.join(each.values())}" for op, each in floors.items())
    copy = f" Copy: {rows[0]['copy_gbps']:.0f} GB/s, read and written."
    cpu = f" cpu: eager's wall time, {rows[0]['cpu']}." if "cpu" in rows[0] else ""
    parts = [
        f"{_origin(rows)}{copy}{cpu}\n",
        "GPU time, as % of the speed of a copy that moves the fewest bytes the operation can "
        f"({passes}), and median microseconds:\n",
        _by_provider(rows, _speed, itemgetter("us")),
    ]
    if small := [row for row in rows if row["shape"] in SMALL]:
        parts += [
            "Small shapes, microseconds a call: until the host is free again / in calls back to "
            "back, host and GPU overlapped. The last columns compare calls back to back:\n",
            _by_provider(small, _calls, itemgetter("wall_us")),
        ]
    if compared := [row for row in rows if _difference(row)]:
        parts += [
            "Largest difference from eager, in parts of the largest element of the same output; "
            f"ours in mode standard; bold above {NEAR:g} in {' or '.join(NEAR_DTYPES)}:\n",
            _by_provider(compared, _difference),
        ]
    return "\n".join(parts)


def _speed(row: Row) -> str:
    percent = row.get("percent_of_copy", 100 * row.get("gbps", 0) / row["copy_gbps"])
    return f"{percent:.0f}% ({_us(row['us'])})"


def _calls(row: Row) -> str:
    return " / ".join(_us(row[key]) for key in ("host_us", "wall_us") if key in row)


def _difference(row: Row) -> str:
    value = row.get("difference", row.get("max_rel"))
    if value is None:
        return ""
    far = row["dtype"] in NEAR_DTYPES and not value <= NEAR
    return f"**{value:.1e}**" if far else f"{value:.1e}"


def _by_provider(rows: Sequence[Row], cell: Callable[[Row], str], time: Time | None = None) -> str:
    """A line for each call, a column for each provider, and one for the speed over each other."""
    names = list(dict.fromkeys(row["provider"] for row in rows))
    ours = [name for name in names if name.startswith("normplug")]
    # The twin runs the same kernels.
    compared = [name for name in ours if name != "normplug-triton" or "normplug" not in ours]
    pairs = [(name, peer) for name in compared for peer in names if peer not in ours]
    return _pivot(rows, CALL, "provider", cell, pairs if time else [], time)


def _steps(rows: Sequence[Row]) -> list[str]:
    parts = []
    for caption, key, form in STEPS:
        found = [row for row in rows if row.get(key) is not None]
        if not found:
            continue

        def cell(row: Row, key: str = key, form: str = form) -> str:
            return form.format(row[key], 1e3 * row["batch"] / row.get("ms", 1.0))

        pairs = [] if "GiB" in caption else PAIRS
        table = _pivot(found, CASE, "arm", cell, pairs, itemgetter(key))
        parts += [f"{caption}:\n", table]
    return parts


def _profile(rows: Sequence[Row]) -> str:
    """A line for each arm, with the speed of its kernels over those of each peer."""
    case = ["model", "batch", "arm"]
    wide = frame([{key: row[key] for key in case} | row["groups_ms"] for row in rows])
    wide = wide.set_index(case)
    wide["all"] = wide.sum(axis=1)
    cells = wide.map("{:.2f}".format)
    totals = wide["all"].groupby(level=case).last().unstack("arm")  # of an arm run twice, the last
    for peer in [peer for peer in PEERS if peer in totals]:
        speeds = totals.rdiv(totals[peer], axis=0).drop(columns=peer).stack().dropna()
        cells[f"over {peer}"] = speeds.map("{:.2f}x".format)
    return show.markdown(cells)


def _training(rows: Sequence[Row]) -> str:
    how = {"autocast": "bfloat16", **rows[0], **rows[0].get("settings", {})}
    optimizer = how.get("optimizer", "SGD, momentum 0.9")
    return (
        f"{_origin(rows)} Training under {how['autocast']} autocast, {optimizer}; swapped in mode "
        f"{how['mode']}.\n"
    )


def _origin(rows: Sequence[Row]) -> str:
    packages = [f"{key} {value}" for key, value in rows[0].items() if key in PACKAGES]
    commits = sorted({row["commit"][:12] for row in rows if "commit" in row})
    commit = [f"commit {' or '.join(commits)}"] if commits else []
    dates = sorted({row["date"][:10] for row in rows})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return ", ".join([rows[0]["device"], *packages, *commit, days]) + "."


def _pivot(
    rows: Sequence[Row],
    columns: Sequence[str],
    series: str,
    cell: Callable[[Row], str],
    pairs: Sequence[tuple[str, str]],
    time: Time | None,
) -> str:
    """A line for each case, a column for each value of `series`, and speeds of pairs of these."""
    found = frame(rows)
    found["cell"] = [cell(row) for row in rows]
    found["time"] = [time(row) if time else None for row in rows]
    names = list(dict.fromkeys(found[series]))
    wide = found.pivot_table(["cell", "time"], list(columns), series, aggfunc="last", dropna=False)
    wide = wide.reindex(found.set_index(list(columns)).index.unique())  # in the order of the rows
    cells = wide["cell"].reindex(columns=names)
    for ours, peer in pairs:
        if {ours, peer} <= set(names):
            speeds = wide["time"][peer] / wide["time"][ours]
            if speeds.notna().any():
                cells[f"{ours} over {peer}"] = speeds.map("{:.2f}x".format).where(speeds.notna())
    return show.markdown(cells)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def text_of(page: Path) -> str:
    """What a page of tables must hold, from the results of the same name."""
    return render(read_file(DOCS / "results" / f"{page.stem}.json"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="print the tables of this file only")
    a = parser.parse_args(argv)
    if a.file:
        print(render(read_file(a.file)), end="")
        return
    for page in DOCS.glob("*_h100.md"):
        write_file(page, text_of(page))
    for name, (results, ops) in PICTURES.items():
        rows = read_file(DOCS / "results" / f"{results}.json")
        if name == "layer_norm_h100":
            rows = [row for row in rows if row["shape"].startswith("4096x")]
        elif ops:
            rows = [row for row in rows if row["dtype"] == "bfloat16"]
        if ops:
            rows = [row for row in rows if row["op"] in ops]
        rows = [row for row in rows if row.get("provider") != "normplug-triton"]
        show.draw(rows, DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
