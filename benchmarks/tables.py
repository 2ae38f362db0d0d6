"""Write the documentation's tables and pictures of the results in docs/results.

python benchmarks/tables.py                       # all pages and pictures
python benchmarks/tables.py FILE.json             # print the tables of a file
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from bars import draw_bars
from normplug._files import write_file
from normplug._pictures import origin_text, save
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
        "Time of the first compiled step, with an empty cache, next to other models, s, lower "
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
    "unet2d": "diffusion UNet, 64x64",
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
# The page and the picture of training steps, and their results.
STEPS_PAGE = "steps_h200"
# Those of version 0.3.0 on an H100. They stand in for the models that were not measured since.
EARLIER_PAGE = "models_h100"
EARLIER = ("models_h100", "compiled_h100")
# The first picture that a reader sees: a few models by name.
DOOR = "door_h200"
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
    "swap+fuse": "normplug",
    "compile": "torch.compile",
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
    "models_h100": "Training steps of version 0.3.0",
    "steps_h200": "Training steps",
}
STEPS_ARMS = {
    "swap": "swap",
    "swap+fuse": "swap + fuse",
    "compile": "torch.compile",
    "swap+fuse+compile": "swap + fuse + compile",
}
# The panels of the picture of all models, by most of their norms; the last has all others.
PANELS = {
    "BatchNorm": (
        *("resnet50", "efficientnet_b0", "mobilenet_v3_large", "regnet_y_1_6gf"),
        *("densenet121", "inception_v3", "cspdarknet53", "r2plus1d_18"),
        "resnet18-cifar",
    ),
    "LayerNorm": (
        *("vit_b_16", "convnext_tiny", "convnextv2_tiny", "swin_t", "deit3_small"),
        *("segformer_b2", "encoder_6x256", "bert_base", "gpt2"),
    ),
    "other norms": (),
}
FASTER_LAYOUT = "each arm in its faster memory layout"
SHORT = {  # names that are shorter in that picture
    "encoder_6x256": "nn.TransformerEncoder",
    "llama_16x1024": "Llama-style",
    "unet2d": "diffusion UNet",
    "nnunet3d": "3d U-Net",
}


class Picture(NamedTuple):
    """A picture of speeds of operations: from a file, the rows whose key matches a pattern.

    The key is "op dtype layout shape". A panel has the rows that are equal in `panels`.
    """

    results: str
    pattern: str
    panels: tuple[str, ...]
    title: str


PICTURES = {
    "batch_norm_h100": Picture(
        "kernels_h100",
        r"batch_norm\S* bfloat16 \S+ (128x256x56x56|256x512x28x28)$",
        ("layout", "direction"),
        "BatchNorm in bfloat16, two shapes",
    ),
    "rms_norm_h100": Picture(
        "families_h100",
        r"(add_)?rms_norm bfloat16 ",
        ("op", "direction"),
        "RMSNorm in bfloat16",
    ),
    "group_norm_h100": Picture(
        "families_h100",
        r"(group|instance)_norm\S* bfloat16 \S+ (16x320x64x64|4x128x512x512|\d+x\d+x128x128x128)$",
        ("layout", "direction"),
        "GroupNorm and InstanceNorm in bfloat16, large shapes",
    ),
    "host_h100": Picture(
        "host_h100",
        r"\S+ \S+ (\S+ 512x768|NHWC \S+)$",
        ("shape", "layout", "dtype", "direction"),
        "Calls on small inputs, back to back",
    ),
}
LINES = "layer_norm_h100"  # the picture of GB/s over the width, and its rows
LINES_PATTERN = r"layer_norm b?float(16|32) 4096x"
# How the panels of a picture are named.
WORDS = {"F": "forward", "F+B": "forward and backward"}
WORDS |= {"rows": "", "NC": "", "NCHW": "contiguous", "NHWC": "channels_last"}
# Providers that no picture shows, since they run the same kernels, and arms of few models.
NOT_DRAWN = {"provider": ("golden", "watched"), "arm": ("swap+fuse+recompute", "liger")}


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
    return values_in_faster_layout(times, times)


def values_in_faster_layout(values: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """What each arm of a model has in the layout in which its time is least."""
    case = [name for name in times.index.names if name != "layout"]
    if "model" not in case:
        return values
    least = times.groupby(case, sort=False).transform("min").reindex(values.index)
    fastest = values.where(times.reindex(values.index).eq(least))
    return fastest.groupby(case, sort=False).min()


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
    """The rows of a page of tables or a picture: of the results of the same name, or `EARLIER`."""
    files = EARLIER if name == EARLIER_PAGE else (name,)
    return [row for file in files for row in _read(file)]


def _read(name: str) -> list[Row]:
    return read_file(DOCS / "results" / f"{name}.json")


def in_layouts(rows: Sequence[Row]) -> list[Row]:
    """The rows of the models that were timed in several memory layouts."""
    return [row for row in rows if "layout" in row]


def steps_rows() -> list[Row]:
    """The rows of training steps: the earlier ones only of models without later ones."""
    later = later_models()
    earlier = [row for row in rows_of(EARLIER_PAGE) if row["model"] not in later]
    return rows_of(STEPS_PAGE) + earlier


def later_models() -> set[str]:
    """The models of `STEPS_PAGE`. All others have a dagger in tables and pictures."""
    return {row["model"] for row in rows_of(STEPS_PAGE)}


def text_of(name: str) -> str:
    """What a page of tables must hold: its rows would crowd the site's search."""
    return f"{NOT_SEARCHED}# {TITLES[name]}\n\n{render(rows_of(name))}"


def steps() -> str:
    """The table of training steps in docs/speed.md. A dagger marks the models with earlier rows."""
    return steps_table(steps_rows(), marked=MODELS.keys() - later_models())


def steps_table(rows: Sequence[Row], marked: Collection[str] = ()) -> str:
    """A table of training steps, with the arms of `ARMS` that were measured.

    A cell has the speed by the time of the whole step, and that by the time in which the GPU is
    busy. A time with `*` waits for the host. The names of the models in `marked` have a dagger.
    """
    times, busy, waits = step_times(rows)
    arms = [arm for arm in ARMS if arm in times]
    header = [
        "model, batch",
        "eager, ms",
        *(PROVIDERS.get(arm, arm.replace("+", " + ")) for arm in arms[1:]),
    ]
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * len(arms) + "|"]
    for model in [model for model in MODELS if model in times.index]:
        name = f"{MODELS[model]} †" if model in marked else MODELS[model]
        for batch in sorted(times.loc[model].index, reverse=True):
            case = model, batch
            marks = {arm: "*" if waits.loc[case, arm] else "" for arm in arms}
            cells = [
                f"{name}, {batch}",
                f"{times.loc[case, 'eager']:.2f}{marks['eager']}",
            ]
            for arm in arms[1:]:
                wall = times.loc[case, "eager"] / times.loc[case, arm]
                own = busy.loc[case, "eager"] / busy.loc[case, arm]
                cells.append(f"{wall:.2f}{marks[arm]}, {own:.2f}".replace("nan", "-"))
            lines.append(f"| {' | '.join(cells)} |".replace("-, -", "-"))
    return "\n".join([*lines, ""])


def step_times(
    rows: Sequence[Row],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The times of steps, those in which the GPU is busy, and whether a step waits for the host.

    Each time is that of the faster layout. A step waits or not in the layout of the faster step.
    """
    found = pd.DataFrame(rows)
    walls, own = pivot(found, "ms"), pivot(found, "gpu_ms")
    times = in_faster_layout(walls)
    busy = in_faster_layout(own).reindex_like(times)
    waits = values_in_faster_layout(own, walls).reindex_like(times) < BUSY * times
    return times, busy, waits


def layouts() -> str:
    """The table of the models that were timed in several memory layouts: "contiguous / other"."""
    found = pd.DataFrame(named(in_layouts(rows_of(STEPS_PAGE))))
    times = pivot(found, "gpu_ms").map("{:.1f}".format)
    return markdown(times.groupby(["model", "batch"], sort=False).agg(" / ".join))


def readme_steps() -> str:
    """README's table of training steps: speeds over eager, the best in bold, and peak memory.

    A model with `*` waits for the host in at least one arm.
    """
    rows = rows_of(STEPS_PAGE)
    found = pd.DataFrame(rows)
    faster = speeds(rows).loc[list(DOOR_MODELS)].sort_values("swap+fuse", ascending=False)
    memory = values_in_faster_layout(pivot(found, "peak_gib"), pivot(found, "ms"))
    *_, waits = step_times(rows)
    header = ["model, batch", *README_ARMS.values(), "peak memory, eager → normplug"]
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for case, speed in faster.iterrows():
        mark = " \\*" if waits.loc[case, ["eager", *README_ARMS]].any() else ""
        texts = [f"{speed[arm]:.2f}" for arm in README_ARMS]
        best = max(texts, key=float)
        texts = [f"**{text}**" if text == best else text for text in texts]
        gib = memory.loc[case]
        texts.append(f"{gib['eager']:.2f} → {gib['swap+fuse']:.2f} GiB")
        lines.append(f"| {DOOR_MODELS[case]}, {case[1]}{mark} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def idle_steps() -> str:
    """The table of the steps that were measured on an idle host, in docs/speed_details.md."""
    return steps_table(_read("models_h200"))


# The pages with tables of training steps -> the start of a table's header, and what writes it.
FILLED = {
    README: {"model, batch | normplug": readme_steps},
    DOCS / "README.md": {"model, batch | normplug": readme_steps},
    DOCS / "speed.md": {"model, batch | eager, ms": steps},
    DOCS / "speed_details.md": {
        "model, batch | eager, ms": idle_steps,
        "model | batch | eager": layouts,
    },
}


def filled(path: Path) -> str:
    """The text of a page of `FILLED`, with its tables of training steps."""
    text = path.read_text()
    for start, write in FILLED[path].items():
        table = write()
        pattern = rf"\| {re.escape(start)} \|[^\n]*\n(?:\|[^\n]*\n)*"
        text, found = re.subn(pattern, lambda _, table=table: table, text)
        if found != 1:
            raise ValueError(f"{path} has {found} tables that start with '{start}'")
    return text


def speeds(rows: Sequence[Row]) -> pd.DataFrame:
    """The speed over eager, of medians: a line for each case, a column for each other arm."""
    found = pd.DataFrame(rows)
    field = next(name for name in ("ms", "us", "wall_us") if name in found)
    times = in_faster_layout(pivot(found, field))
    return times.rdiv(times["eager"], axis=0).drop(columns="eager")


def shown(rows: Sequence[Row], keys: Sequence[str], pattern: str) -> list[Row]:
    """The rows whose fields `keys` match a pattern, without what no picture shows."""
    drawn = [
        row
        for row in rows
        if not any(row.get(series) in names for series, names in NOT_DRAWN.items())
    ]
    return [
        row
        for row in drawn
        if re.match(pattern, " ".join(str(row.get(key)) for key in keys))
    ]


def draw_picture(picture: Picture) -> Figure:
    """Draw the speeds of operations over eager."""
    found = shown(
        _read(picture.results), ("op", "dtype", "layout", "shape"), picture.pattern
    )
    faster = speeds(named(found))
    cases = faster.index.to_frame(index=False).astype(str).replace(WORDS)
    shared = [
        name for name in cases if name not in picture.panels and cases[name].nunique() > 1
    ]
    panels = {}
    for words, part in cases.groupby(list(picture.panels), sort=False):
        speeds_of_part = faster.iloc[part.index]
        speeds_of_part.index = [", ".join(line) for line in part[shared].to_numpy()]
        panels[", ".join(filter(None, words))] = speeds_of_part
    panels = dict(sorted(panels.items(), key=lambda panel: -len(panel[1])))
    extra = ["liger-kernel"] if "Liger-Kernel" in faster else []
    title = f"{picture.title}\n{origin_text(found, *extra)}"
    return draw_bars(panels, title, by="normplug")


def draw_models(rows: Sequence[Row]) -> Figure:
    """Draw the training steps of all models: a column of panels for each arm."""
    drawn = shown(rows, ("model",), "")
    faster = speeds(drawn)[list(STEPS_ARMS)].rename(columns=STEPS_ARMS)
    place = {model: panel for panel, models in PANELS.items() for model in models}
    later = later_models()
    *_, rest = PANELS
    by_panel = faster.groupby(
        [place.get(model, rest) for model, _ in faster.index], sort=False
    )
    panels = {}
    for panel, part in by_panel:
        names = [
            f"{SHORT.get(model, MODELS[model])}{'' if model in later else ' †'}, {batch}"
            for model, batch in part.index
        ]
        panels[panel] = part.set_axis(names)
    title = f"Training steps in bfloat16, by model and batch\n{origin_text(drawn)}"
    note = f"{FASTER_LAYOUT}; † version 0.3.0, H100, CNNs in channels_last"
    return draw_bars(panels, f"{title}\n{note}", by="swap + fuse", apart=True)


def draw_door(rows: Sequence[Row]) -> Figure:
    """Draw the models of `DOOR_MODELS`, the fastest with normplug first."""
    drawn = [
        row | {"model": DOOR_MODELS[row["model"], row["batch"]]}
        for row in rows
        if (row["model"], row["batch"]) in DOOR_MODELS
    ]
    faster = speeds(drawn).droplevel("batch")[list(DOOR_ARMS)].rename(columns=DOOR_ARMS)
    title = f"Training steps in bfloat16, {FASTER_LAYOUT}\n{origin_text(drawn)}"
    return draw_bars({"": faster}, title, by="normplug", apart=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "file", type=Path, nargs="?", help="print the tables of this file only"
    )
    if file := parser.parse_args(argv).file:
        print(render(read_file(file)), end="")
        return
    for name in TITLES:
        write_file(DOCS / f"{name}.md", text_of(name))
    for page in FILLED:
        write_file(page, filled(page))
    save(draw_door(rows_of(STEPS_PAGE)), DOCS / f"{DOOR}.png")
    save(draw_models(steps_rows()), DOCS / f"{STEPS_PAGE}.png")
    for name, picture in PICTURES.items():
        save(draw_picture(picture), DOCS / f"{name}.png")
    rows = shown(rows_of(LINES), ("op", "dtype", "shape"), LINES_PATTERN)
    draw(
        named(rows),
        DOCS / f"{LINES}.png",
        f"GB/s of LayerNorm over the width of a row\n{origin_text(rows, 'liger-kernel')}",
    )


if __name__ == "__main__":
    main()
