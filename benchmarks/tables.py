"""Write the documentation's tables and pictures of the results in docs/results.

python benchmarks/tables.py                       # all pages and pictures
python benchmarks/tables.py FILE.json             # print the tables of a file
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from normplug._files import write_file
from normplug.bench import devices
from normplug.bench.rows import Row, draw, read_file

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "README.md"
CASE = ("model", "batch", "op", "direction", "layout", "shape", "dtype")
ORIGIN = (
    "device",
    "torch",
    "triton",
    "cuda",
    "python",
    "normplug",
    "torchvision",
    "transformers",
)
ORIGIN += (
    "diffusers",
    "liger_kernel",
    "liger-kernel",
    "flag_gems",
    "timm",
    "commit",
    "mode",
)
SPEED = ", lower is better (speed over eager, higher is better)"
TABLES = {  # a row's field -> the caption of its table, and the format of a cell
    "ms": (f"Median time of a training step, ms{SPEED}", "{:.2f}"),
    "gpu_ms": (f"Time in which the GPU is busy in a step, ms{SPEED}", "{:.2f}"),
    "host_ms": (f"The host's time for a step, ms{SPEED}", "{:.2f}"),
    "first_step_s": (
        "Time of the first step, with no compiled kernel on disk, s, lower is better",
        "{:.1f}",
    ),
    "compile_s": (
        "Time of the first compiled step, with an empty cache and beside other models, s, lower "
        "is better",
        "{:.0f}",
    ),
    "peak_gib": ("Peak memory of a step, GiB, lower is better", "{:.2f}"),
    "call_us": (
        f"Median time of a call in calls back to back, microseconds{SPEED}",
        "{:.0f}",
    ),
    "us": (f"Median GPU time, microseconds{SPEED}", "{:.1f}"),
    "percent": (
        "Speed, as % of a copy that moves the fewest bytes, higher is better",
        "{:.0f}",
    ),
    "max_rel": (
        "Largest difference from eager, relative to the largest element of the same output; "
        "normplug in mode standard",
        "{:.1e}",
    ),
    "max_rel_f64": (
        "Largest difference from float64, relative to the largest element of the same result",
        "{:.1e}",
    ),
}
# The names of models in docs/speed.md, in its order.
MODELS = {
    "resnet50": "ResNet-50",
    "vit_b_16": "ViT-B/16",
    "convnext_tiny": "ConvNeXt-T",
    "convnextv2_tiny": "ConvNeXtV2-T",
    "swin_t": "Swin-T",
    "deit3_small": "DeiT3-S",
    "efficientnet_b0": "EfficientNet-B0",
    "mobilenet_v3_large": "MobileNetV3-L",
    "resnext50": "ResNeXt-50",
    "regnet_y_1_6gf": "RegNetY-1.6GF",
    "densenet121": "DenseNet-121",
    "inception_v3": "Inception-v3",
    "cspdarknet53": "CSPDarkNet-53",
    "r2plus1d_18": "R(2+1)D-18",
    "segformer_b2": "SegFormer-B2",
    "resnet18-cifar": "ResNet-18 for CIFAR",
    "encoder_6x256": "`nn.TransformerEncoder`, 6 x 256",
    "bert_base": "BERT-base",
    "gpt2": "GPT-2",
    "llama_16x1024": "Llama-style, 16 x 1024",
    "qwen3": "Qwen3-style",
    "t5_small": "T5-small",
    "unet2d": "diffusion UNet, 64x64, channels_last only",
    "nnunet3d": "3d U-Net, 128x128x128",
}
# The names of operations and providers in tables and pictures.
OPS = {
    "batch_norm": "BatchNorm",
    "batch_norm_relu": "BatchNorm + ReLU",
    "batch_norm_add_relu": "BatchNorm + add + ReLU",
    "layer_norm": "LayerNorm",
    "add_layer_norm": "add + LayerNorm",
    "add_bias_layer_norm": "bias + LayerNorm",
    "adaptive_layer_norm": "LayerNorm + scale and shift",
    "rms_norm": "RMSNorm",
    "rms_norm_gate": "RMSNorm + SiLU gate",
    "gate_rms_norm": "SiLU gate + RMSNorm",
    "add_rms_norm": "add + RMSNorm",
    "group_norm": "GroupNorm",
    "group_norm_silu": "GroupNorm + SiLU",
    "instance_norm": "InstanceNorm",
}
PROVIDERS = {
    "compile": "torch.compile",
    "flaggems": "FlagGems",
    "liger": "Liger-Kernel",
    "normplug-python": "normplug, through Python",
    "quack": "QuACK",
}
# The arms of the table of training steps in docs/speed.md, if they were measured.
ARMS = ("eager", "compile", "swap", "swap+fuse", "swap+fuse+compile")
BUSY = 0.9  # a step in which the GPU is busy for a smaller share waits for the host, and is marked
# The results of training steps; the second file has the compiled arms, the third the models that
# were timed in more than one memory layout.
STEPS = ("models_h100", "compiled_h100", "layouts_h100")
LAYOUTS = STEPS[2]
# The first picture that a reader sees: a few models by name.
DOOR = "door_h100"
DOOR_MODELS = {
    ("resnet50", 256): "ResNet-50",
    ("convnext_tiny", 128): "ConvNeXt-T",
    ("vit_b_16", 128): "ViT-B/16",
    ("bert_base", 32): "BERT-base",
    ("gpt2", 16): "GPT-2",
    ("llama_16x1024", 8): "Llama-style",
    ("unet2d", 16): "diffusion UNet",
    ("nnunet3d", 2): "3d U-Net",
}
DOOR_ARMS = {
    "compile": "torch.compile",
    "swap+fuse": "normplug",
    "swap+fuse+compile": "normplug and torch.compile",
}
# The columns of README's table, which has the same models.
README_ARMS = {
    "swap+fuse": "normplug",
    "compile": "`torch.compile`",
    "swap+fuse+compile": "both",
}
# The lines before a page of tables, which leave it out of the site's search.
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
# A page of tables in docs/ -> its title.
TITLES = {
    "bias_layer_norm_h100": "Bias + LayerNorm",
    "cudnn_h100": "BatchNorm compared with cuDNN",
    "devices_h100": "CPU and GPU",
    "families_h100": "RMSNorm, GroupNorm and InstanceNorm",
    "host_h100": "CPU overhead of single calls",
    "kernels_h100": "BatchNorm",
    "kernels_small_h100": "BatchNorm and LayerNorm of small inputs",
    "layer_norm_h100": "LayerNorm",
    "models_h100": "Training steps",
}
# The name of a picture -> its file of results, and a pattern of its rows.
PICTURES = {
    "models_h100": ("models_h100", ""),
    "batch_norm_h100": ("kernels_h100", r"batch_norm\S* bfloat16"),
    "layer_norm_h100": ("layer_norm_h100", r"layer_norm b?float(16|32) 4096x"),
    "rms_norm_h100": ("families_h100", r"(add_)?rms_norm bfloat16"),
    "group_norm_h100": ("families_h100", r"(group|instance)_norm\S* bfloat16"),
    "host_h100": ("host_h100", ""),
}


# The colours of arms and providers, distinct in grey too.
COLOURS = {
    "torch.compile": "#dbe9f6",
    "normplug, through Python": "#fdc086",
    "swap": "#fdc086",
    "normplug": "#e6761b",
    "swap + fuse": "#e6761b",
    "normplug and torch.compile": "#173f5f",
    "swap + fuse + compile": "#173f5f",
    "Liger-Kernel": "#3f7d3f",
    "QuACK": "#c9a0dc",
}
OTHER_COLOUR = "#000000"
# Providers that no picture shows, since they run the same kernels, and arms of few models.
NOT_DRAWN = {"provider": ("golden", "watched"), "arm": ("swap+fuse+recompute", "liger")}
# Numbers of an axis of speeds.
TICKS = (0.25, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def named(rows: Sequence[Row]) -> list[Row]:
    """Rows with the names that a reader knows in place of those of the scripts."""
    names = {"op": OPS, "provider": PROVIDERS, "arm": PROVIDERS, "model": MODELS}
    shown = [dict(row) for row in rows]
    for row in shown:
        for key in names.keys() & row.keys():
            row[key] = names[key].get(row[key], row[key].replace("+", " + "))
    return shown


def pivot(found: pd.DataFrame, values: str) -> pd.DataFrame:
    """The medians of a field: a line for each case, a column for each arm or provider."""
    found = found[found[values].notna()]
    case = [key for key in CASE if key in found and found[key].notna().any()]
    found = found.fillna(dict.fromkeys(case, ""))
    series = "arm" if "arm" in found else "provider"
    wide = found.pivot_table(values, case, series, aggfunc="median", sort=False)
    return wide[[name for name in found[series].unique() if name in wide]]


def eager_of(times: pd.DataFrame) -> pd.Series:
    """Eager's time in each case. A model's is that in its faster layout, as users may choose it."""
    case = [name for name in times.index.names if name != "layout"]
    if "model" in case:
        return times["eager"].groupby(case, sort=False).transform("min")
    return times["eager"]


def in_faster_layout(times: pd.DataFrame) -> pd.DataFrame:
    """The times of models, each arm in its faster layout."""
    case = [name for name in times.index.names if name != "layout"]
    return times.groupby(case, sort=False).min() if "model" in case else times


def render(rows: Sequence[Row]) -> str:
    """The tables of a file of results of any of the scripts."""
    if "cuda_us" in rows[0]:
        return devices.markdown(rows)
    found = pd.DataFrame(named(rows))
    parts = [f"{_origin(rows)}.\n"]
    if "copy_gbps" in found:
        parts.append(f"Copy: {found['copy_gbps'].iloc[0]:.0f} GB/s, read and written.\n")
        found["percent"] = 100 * found["gbps"] / found["copy_gbps"]
    if "wall_us" in found and "us" not in found:  # rows of `host.py`
        found["call_us"] = found["wall_us"]
    for field, (caption, form) in TABLES.items():
        if field in found:
            wide = pivot(found, field)
            cells = wide.map(form.format)
            if caption.endswith(SPEED) and "eager" in wide:
                faster = wide.rdiv(eager_of(wide), axis=0)
                texts = faster.map(" ({:.2f}x)".format).where(faster.notna(), "")
                cells += texts.assign(eager="")
            parts += [f"{caption}:\n", markdown(cells.where(wide.notna(), "-"))]
    return "\n".join(parts)


def markdown(cells: pd.DataFrame) -> str:
    """A frame as a Markdown table, with the levels of its index first; numbers align right."""
    header = [*cells.index.names, *cells.columns]
    rules = ["---"] * cells.index.nlevels + ["---:"] * len(cells.columns)
    lines = [header, rules, *cells.reset_index().astype(str).values.tolist()]
    texts = ([cell.replace("|", "/") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in texts)


def _origin(rows: Sequence[Row]) -> str:
    """Where rows come from, in words: the device, versions of packages, commits and dates."""
    words = []
    for key in ORIGIN:
        if found := sorted({str(row[key]) for row in rows if row.get(key)}):
            words.append(("" if key == "device" else f"{key} ") + " or ".join(found))
    days = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    return ", ".join([*words, " to ".join(dict.fromkeys(days[:1] + days[-1:]))])


def rows_of(name: str) -> list[Row]:
    """The rows of a page of tables or a picture, from the results of the same name."""
    return _steps() if name == STEPS[0] else _read(name)


def _read(name: str) -> list[Row]:
    return read_file(DOCS / "results" / f"{name}.json")


def _steps() -> list[Row]:
    """The rows of training steps. A model timed in several layouts has no times in one alone."""
    several = {(row["model"], row["batch"]) for row in _read(LAYOUTS)}
    rows = [row for name in STEPS for row in _read(name)]
    for row in rows:
        if (row["model"], row["batch"]) in several and "layout" not in row:
            for field in ("ms", "gpu_ms"):
                row.pop(field, None)
    return rows


def layouts_note(rows: Sequence[Row]) -> str:
    """What a picture must say about the models that were timed in several layouts."""
    names = dict.fromkeys(
        str(row["model"]) for row in rows if "model" in row and "layout" in row
    )
    return "; ".join(f"{name}: GPU time, each arm in its faster layout" for name in names)


def text_of(page: Path) -> str:
    """What a page of tables must hold: its rows would crowd the site's search."""
    return f"{NOT_SEARCHED}# {TITLES[page.stem]}\n\n{render(rows_of(page.stem))}"


def steps() -> str:
    """The table of training steps in docs/speed.md, with the arms of `ARMS` that were measured."""
    found = pd.DataFrame(rows_of(STEPS[0]))
    busy = in_faster_layout(pivot(found, "gpu_ms"))
    times = in_faster_layout(pivot(found, "ms")).reindex(busy.index)
    arms = [arm for arm in ARMS if arm in times]
    header = [
        "model, batch",
        "eager, ms",
        *(PROVIDERS.get(arm, arm.replace("+", " + ")) for arm in arms[1:]),
    ]
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * len(arms) + "|"]
    for model in [model for model in MODELS if model in times.index]:
        for batch in sorted(times.loc[model].index, reverse=True):
            row, gpu = times.loc[model, batch], busy.loc[model, batch]
            waits = {arm: "*" if gpu[arm] < BUSY * row[arm] else "" for arm in arms}
            eager = f"{row['eager']:.2f}{waits['eager']}"
            if pd.isna(row["eager"]):
                eager = f"{gpu['eager']:.1f}†"
            cells = [f"{MODELS[model]}, {batch}", eager]
            for arm in arms[1:]:
                wall, own = row["eager"] / row[arm], gpu["eager"] / gpu[arm]
                cells.append(f"{wall:.2f}{waits[arm]}, {own:.2f}".replace("nan", "-"))
            lines.append(f"| {' | '.join(cells)} |".replace("-, -", "-"))
    return "\n".join([*lines, ""])


def layouts() -> str:
    """The table of the models that were timed in several memory layouts."""
    return markdown(
        pivot(pd.DataFrame(named(_read(LAYOUTS))), "gpu_ms").map("{:.1f}".format)
    )


def readme_steps() -> str:
    """README's table of training steps: speeds over eager, the best in bold, and peak memory.

    A model with `*` waits for the host in at least one arm. One with a dagger has GPU times, each
    arm in its faster layout; its memory is of the layout that both arms were measured in.
    """
    rows = rows_of(STEPS[0])
    found = pd.DataFrame(rows)
    faster = speeds(rows).loc[list(DOOR_MODELS)].sort_values("swap+fuse", ascending=False)
    memory = in_faster_layout(pivot(found, "peak_gib"))
    busy = in_faster_layout(pivot(found, "gpu_ms"))
    times = in_faster_layout(pivot(found, "ms")).reindex(busy.index)
    waits = busy < BUSY * times
    header = ["model, batch", *README_ARMS.values(), "peak memory, eager → normplug"]
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for case, speed in faster.iterrows():
        mark = " \\*" if waits.loc[case, ["eager", *README_ARMS]].any() else ""
        if times.loc[case].isna().all():
            mark = " †"
        texts = [f"{speed[arm]:.2f}" for arm in README_ARMS]
        best = max(texts, key=float)
        texts = [f"**{text}**" if text == best else text for text in texts]
        gib = memory.loc[case]
        texts.append(f"{gib['eager']:.2f} → {gib['swap+fuse']:.2f} GiB")
        lines.append(f"| {DOOR_MODELS[case]}, {case[1]}{mark} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def filled(page: str) -> str:
    """The text of docs/speed.md or README, with the tables of steps and of layouts."""
    for start, table in (
        ("model, batch | eager, ms", steps()),
        ("model | batch | layout", layouts()),
        ("model, batch | normplug", readme_steps()),
    ):
        pattern = rf"\| {re.escape(start)} \|[^\n]*\n(?:\|[^\n]*\n)*"
        page = re.sub(pattern, lambda _, table=table: table, page)
    return page


def speeds(rows: Sequence[Row]) -> pd.DataFrame:
    """The speed over eager, of medians: a line for each case, a column for each other arm."""
    found = pd.DataFrame(rows)
    if "gpu_ms" in found:  # the only time of a model in several layouts
        found["ms"] = found["ms"].fillna(found["gpu_ms"])
    field = next(name for name in ("ms", "us", "wall_us") if name in found)
    times = in_faster_layout(pivot(found, field))
    return times.rdiv(times["eager"], axis=0).drop(columns="eager")


def draw_speeds(faster: pd.DataFrame, path: Path, title: str, width: float = 9) -> None:
    """Draw a group of bars for each line of `speeds`: from eager's speed, the line at 1."""
    figure = Figure((width, 1.5 + 0.17 * faster.size), layout="constrained")
    axes = figure.subplots()
    bars = {
        "width": 0.8,
        "color": [COLOURS.get(name, OTHER_COLOUR) for name in faster],
        "edgecolor": "black",
    }
    (faster - 1).plot.barh(ax=axes, left=1, linewidth=0.4, legend=False, **bars)
    axes.set_xscale("log", base=2)
    lowest, highest = min(0.9, 0.95 * faster.min(axis=None)), 1.1 * faster.max(axis=None)
    ticks = [tick for tick in TICKS if lowest <= tick <= highest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(lowest, highest)
    axes.invert_yaxis()
    axes.set(xlabel="speed over eager PyTorch, of medians (higher is better)", ylabel="")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    lines = [
        part
        for line in title.split("\n")
        for part in textwrap.wrap(line, int(14 * width))
    ]
    figure.suptitle("\n".join(lines), fontsize="small")
    figure.savefig(path, dpi=150)


def draw_door(rows: Sequence[Row], path: Path) -> None:
    """Draw the models of `DOOR_MODELS`, the fastest with normplug first."""
    faster = speeds(rows).reindex(index=list(DOOR_MODELS), columns=list(DOOR_ARMS))
    faster.index = list(DOOR_MODELS.values())
    faster = faster.rename(columns=DOOR_ARMS).sort_values("normplug", ascending=False)
    days = sorted({str(row["date"])[:10] for row in rows})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    shown = [
        row | {"model": DOOR_MODELS[row["model"], row["batch"]]}
        for row in rows
        if (row["model"], row["batch"]) in DOOR_MODELS
    ]
    title = (
        f"{rows[0]['device']}, training steps in bfloat16, {when}\n{layouts_note(shown)}"
    )
    draw_speeds(faster, path, title.strip(), width=6)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "file", type=Path, nargs="?", help="print the tables of this file only"
    )
    if file := parser.parse_args(argv).file:
        print(render(read_file(file)), end="")
        return
    for page in DOCS.glob("*_h100.md"):
        write_file(page, text_of(page))
    for page in (README, DOCS / "speed.md"):
        write_file(page, filled(page.read_text()))
    for name, (results, pattern) in PICTURES.items():
        rows = rows_of(results)
        shown = [
            row
            for row in rows
            if re.match(
                pattern, " ".join(str(row.get(key)) for key in ("op", "dtype", "shape"))
            )
            and not any(row.get(series) in names for series, names in NOT_DRAWN.items())
        ]
        shown = named(shown)
        picture = DOCS / f"{name}.png"
        if name == "layer_norm_h100":
            draw(shown, picture, "\n".join(textwrap.wrap(_origin(rows), 120)))
        else:
            faster = speeds(shown)
            levels = {name: faster.index.unique(name) for name in faster.index.names}
            same = [name for name, values in levels.items() if len(values) == 1]
            faster.index = [
                ", ".join(map(str, case)).replace("`", "")
                for case in faster.index.droplevel(same).to_flat_index()
            ]
            title = [
                _origin(rows),
                *(str(levels[name][0]) for name in same if name != "layout"),
            ]
            if "direction" in levels:
                title.append("F: forward, F+B: forward and backward")
            title += filter(None, [layouts_note(shown)])
            draw_speeds(
                faster, picture, "\n".join([title[0], "; ".join(title[1:])]).strip()
            )
    draw_door(rows_of(STEPS[0]), DOCS / f"{DOOR}.png")


if __name__ == "__main__":
    main()
