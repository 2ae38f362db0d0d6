"""Write the documentation's tables and pictures of the results in docs/results.

python benchmarks/tables.py                       # all pages and pictures
python benchmarks/tables.py FILE.json             # print the tables of a file
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from normplug._results import write_file
from normplug.bench import show
from normplug.bench.rows import Row, read_file

DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = ("torchvision", "transformers", "diffusers", "liger_kernel", "liger-kernel")
PACKAGES += ("flag_gems", "timm")
NEAR, NEAR_DTYPES = 1e-7, ["float32", "float64"]  # differences from torch that are expected
PEERS = ("eager", "compile", "liger")  # arms of others
PAIRS = [  # arms whose training steps are compared
    ("swap", "eager"),
    *(("swap+fuse", peer) for peer in PEERS),
    ("swap+fuse+compile", "compile"),
    ("swap+fuse+graph", "eager+graph"),
    ("no-norm", "eager"),
]
STEPS = {  # a row's field -> the caption of its table, and the format of a cell
    "ms": ("Median time of a training step, and samples a second", "{:.2f} ms, {:.0f}/s"),
    "best_ms": ("Best time of a step, ms", "{:.2f}"),
    "gpu_ms": ("Time in which the GPU is busy in a step, ms", "{:.2f}"),
    "host_ms": ("The host's time for a step, ms", "{:.2f}"),
    "first_step_s": ("Time of the first step, with no compiled kernel on disk, s", "{:.1f}"),
    "peak_gib": ("Peak memory of a step, GiB", "{:.2f}"),
}
# The name of a picture -> its file of results, and its operations if these are not all. Results of
# 0.2 have short names of operations.
PICTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "models_h100": ("models_h100", ()),
    "batch_norm_h100": (
        "kernels_h100",
        ("bn", "bn_relu", "bn_add_relu", "batch_norm", "batch_norm_relu", "batch_norm_add_relu"),
    ),
    "layer_norm_h100": ("layer_norm_h100", ("ln", "layer_norm")),
    "rms_norm_h100": ("families_h100", ("rms", "add_rms", "rms_norm", "add_rms_norm")),
    "group_norm_h100": (
        "families_h100",
        ("gn", "gn_silu", "in3d", "group_norm", "group_norm_silu", "instance_norm"),
    ),
    "host_h100": ("host_h100", ()),
}


def render(rows: Sequence[Row]) -> str:
    """The tables of a file of results of any of the scripts."""
    found = pd.DataFrame(rows)
    origin = _origin(rows)
    if "floor_passes" in found:
        return "\n".join([f"{origin}. {_copy(found)}\n", *_kernels(found)])
    how = {"autocast": "bfloat16", "optimizer": "SGD, momentum 0.9", **rows[0]}
    trained = f"Training under {how['autocast']} autocast, {how['optimizer']}; swapped in mode"
    parts = [f"{origin}. {trained} {how['mode']}.\n", *_steps(found)]
    if "groups_ms" in found:
        parts += ["GPU time of a training step by groups of kernels, ms:\n", _profile(found)]
    return "\n".join(parts)


def _copy(found: pd.DataFrame) -> str:
    return f"Copy: {found['copy_gbps'].iloc[0]:.0f} GB/s, read and written."


def _kernels(found: pd.DataFrame) -> Iterator[str]:
    floors = found.groupby(["op", "direction"], sort=False)["floor_passes"].first()
    passes = "; ".join(
        f"{op}: {', '.join(f'{direction} {n}P' for (_, direction), n in each.items())}"
        for op, each in floors.groupby("op", sort=False)
    )
    yield (
        "GPU time, as % of the speed of a copy that moves the fewest bytes the operation can "
        f"({passes}), and median microseconds:\n"
    )
    percent = 100 * found["gbps"] / found["copy_gbps"]
    yield _table(
        found, percent.map("{:.0f}%".format) + found["us"].map(_us).map(" ({})".format), "us"
    )
    if "max_rel" in found:
        yield (
            "Largest difference from eager, in parts of the largest element of the same output; "
            f"ours in mode standard; bold above {NEAR:g} in {' or '.join(NEAR_DTYPES)}:\n"
        )
        compared = found[found["max_rel"].notna()]
        far = compared["dtype"].isin(NEAR_DTYPES) & ~(compared["max_rel"] <= NEAR)
        cells = compared["max_rel"].map("{:.1e}".format)
        yield _table(compared, cells.mask(far, "**" + cells + "**"))


def _table(found: pd.DataFrame, cells: pd.Series, time: str | None = None) -> str:
    """A line for each call, a column for each provider, and normplug's speed over each other."""
    wide = show.pivot(found.assign(cell=cells), "provider", "cell", "last")
    if time is None:
        return markdown(wide)
    ours = [name for name in wide if name.startswith("normplug")]
    # `normplug-triton` runs the same kernels as `normplug`.
    compared = [name for name in ours if name != "normplug-triton" or "normplug" not in ours]
    pairs = [(name, peer) for name in compared for peer in wide if peer not in ours]
    return markdown(_with_speeds(wide, show.pivot(found, "provider", time), pairs))


def _with_speeds(
    cells: pd.DataFrame, times: pd.DataFrame, pairs: Iterable[tuple[str, str]]
) -> pd.DataFrame:
    """The cells, and a column for each pair of columns of `times`: the speed ratio of the two."""
    for ours, peer in pairs:
        if {ours, peer} <= set(times) and (speeds := (times[peer] / times[ours]).dropna()).any():
            cells = cells.assign(**{f"{ours} over {peer}": speeds.map("{:.2f}x".format)})
    return cells


def _origin(rows: Sequence[Row]) -> str:
    """Where rows come from, in words: the device, versions of packages, commits and dates."""
    words = []
    for key in ("device", "torch", "triton", "cuda", "python", "normplug", *PACKAGES, "commit"):
        if found := sorted({str(row[key]) for row in rows if row.get(key)}):
            words.append(("" if key == "device" else f"{key} ") + " or ".join(found))
    days = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    return ", ".join([*words, " to ".join(dict.fromkeys(days[:1] + days[-1:]))])


def markdown(cells: pd.DataFrame) -> str:
    """A frame as a Markdown table, with the levels of its index first; numbers align right."""
    header = [*cells.index.names, *cells.columns]
    rules = ["---"] * cells.index.nlevels + ["---:"] * len(cells.columns)
    lines = cells.astype(object).fillna("-").reset_index().astype(str).values.tolist()
    lines = ([cell.replace("|", "/") for cell in line] for line in (header, rules, *lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _steps(found: pd.DataFrame) -> Iterator[str]:
    for key, (caption, form) in STEPS.items():
        part = found[found[key].notna()] if key in found else found[:0]
        if len(part):
            yield f"{caption}:\n"
            samples = 1e3 * part["batch"] / part[key]
            cells = [form.format(*pair) for pair in zip(part[key], samples, strict=True)]
            wide = show.pivot(part.assign(cell=cells), "arm", "cell", "last")
            pairs = [] if key == "peak_gib" else PAIRS
            yield markdown(_with_speeds(wide, show.pivot(part, "arm", key), pairs))


def _profile(found: pd.DataFrame) -> str:
    """A line for each arm, with the ratio of its kernels' speed to each peer's."""
    case = ["model", "batch", "arm"]
    found = found[found["groups_ms"].astype(bool)].set_index(case)  # without failed profiles
    wide = pd.DataFrame(list(found["groups_ms"]), found.index)
    wide["all"] = wide.sum(axis=1)
    cells = wide.map("{:.2f}".format)
    totals = wide["all"].groupby(level=case).last().unstack("arm")  # of an arm run twice, the last
    for peer in [peer for peer in PEERS if peer in totals]:
        speeds = totals.rdiv(totals[peer], axis=0).drop(columns=peer).stack().dropna()
        cells[f"over {peer}"] = speeds.map("{:.2f}x".format)
    return markdown(cells)


def text_of(page: Path) -> str:
    """What a page of tables must hold, from the results of the same name."""
    return render(read_file(DOCS / "results" / f"{page.stem}.json"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="print the tables of this file only")
    if file := parser.parse_args(argv).file:
        print(render(read_file(file)), end="")
        return
    for page in DOCS.glob("*_h100.md"):
        write_file(page, text_of(page))
    for name, (results, ops) in PICTURES.items():
        rows = read_file(DOCS / "results" / f"{results}.json")
        if ops:
            only = "float32 bfloat16" if name == "layer_norm_h100" else "bfloat16"
            rows = [row for row in rows if row["op"] in ops and row["dtype"] in only]
        if name == "layer_norm_h100":
            rows = [row for row in rows if row["shape"].startswith("4096x")]
        rows = [row for row in rows if row.get("provider") != "normplug-triton"]
        show.draw(rows, DOCS / f"{name}.png", _origin(rows))


if __name__ == "__main__":
    main()
