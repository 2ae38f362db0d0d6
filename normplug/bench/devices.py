"""Time normplug's layers on the CPU and on the GPU, for one table of both."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from normplug._files import processor, stamp, write_file
from normplug.bench import timing
from normplug.bench.op import OURS, ROWS, Case, Problem, cases, ours
from normplug.bench.rows import Row, add_to_file, cell

CPU = torch.device("cpu")
OPS = ("batch_norm", "layer_norm")
# Batch x features.
SIZES = [(32, 128), (128, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]
# Of BatchNorm2d. The largest case then needs 7 GiB: 4 times the 1.8 of 2048x4096x2x2.
SPACE = (2, 2)
COLUMNS = ("cpu_us", "cuda_us", "speed_up")
NO_GPU = "no CUDA device"
ABOUT = """\
normplug on both devices: a norm of torch.nn after `swap`, in training and in mode
standard. On the CPU it runs PyTorch's operations, on the GPU normplug's kernels. F is the
forward, F+B the forward and the backward. All results were checked against float64 before
they were timed.

CPU and GPU: the median microseconds of a call in calls back to back, with one clock for
both devices. The launch of a kernel counts, a transfer between the devices does not.
Speed-up: CPU time / GPU time; higher is better.

`batch_norm` of batch x features is BatchNorm1d; with a height and a width it is BatchNorm2d
in channels_last memory (NHWC).
"""
HEADER = (
    "operation",
    "shape",
    "layout",
    "dtype",
    "direction",
    "CPU, us",
    "GPU, us",
    "speed-up",
)
RULES = ("---", "---", "---", "---", "---", "---:", "---:", "---:")


def cases_of(
    op: str | None, shapes: Sequence[tuple[int, ...]] | None, dtypes: Sequence[str]
) -> list[Case]:
    """The cases of one operation or of `OPS`, by default in all `SIZES`.

    Images are in channels_last memory only: a CPU is slow in the other layout if there are many
    channels and few pixels. (34 s in place of 2.9 s for the forward and backward of a BatchNorm2d
    of 4096x8192x2x2; two cores of an AMD EPYC, torch 2.14.1, 2026-11-28.)
    """
    chosen: list[Case] = []
    for name in OPS if op is None else (op,):
        images = [] if name in ROWS else [(*size, *SPACE) for size in SIZES]
        for case in cases([name], shapes or [*SIZES, *images], dtypes):
            has_other_layout = len(case.shape) >= 4
            if not (case.layout == "NCHW" and has_other_layout):
                chosen.append(case)
    return chosen


def measure(
    case: Case, devices: Iterable[torch.device], eps: float | None = None
) -> list[Row]:
    """A row for each direction, with the time of a call on each device.

    Raises:
        AssertionError: a result on one of the devices is less accurate than torch's.
    """
    gc.collect()  # the tensors of an earlier case
    calls = {}
    for device in devices:
        problem = Problem(case, device, eps)
        layer = ours(copy.deepcopy(problem.layer))
        problem.check(f"{OURS} on {device.type}", layer)
        calls[device.type] = problem.calls(layer)
    facts = {
        **case.facts(),
        "eps": problem.eps,
        "mode": "standard",
        "provider": OURS,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        **stamp("cuda" in calls),
    }
    rows = []
    for direction in ("F", "F+B"):
        turns = {
            kind: timing.back_to_back(call[direction]) for kind, call in calls.items()
        }
        row: Row = {**facts, "direction": direction, "cuda_us": None}
        for kind, timed in timing.in_turns("us", turns).items():
            row |= {f"{kind}_{field}": value for field, value in timed.items()}
        if "cuda" in calls:
            row["speed_up"] = row["cpu_us"] / row["cuda_us"]
        rows.append(row)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """What was compared, a table with a line for each row, and where it was measured."""
    lines = [HEADER, RULES]
    for row in rows:
        names = [row[key] for key in ("op", "shape", "layout", "dtype", "direction")]
        gpu_us = NO_GPU if row["cuda_us"] is None else cell(row["cuda_us"])
        lines.append((*names, cell(row["cpu_us"]), gpu_us, cell(row.get("speed_up"))))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    first = rows[0]
    gpu = NO_GPU if first["cuda_us"] is None else first["device"]
    where = f"{first['cpu']}, threads: {first['threads']}; GPU: {gpu}"
    versions = [
        f"{name} {first[name]}"
        for name in ("torch", "triton", "normplug")
        if name in first
    ]
    origin = ", ".join([*versions, f"commit {first['commit']}", first["date"][:10]])
    return f"{ABOUT}\n{table}\n{where}; {origin}.\n"


def report(found: Iterable[list[Row]], json: Path, page: Path) -> None:
    """Append rows to a JSON file as they are measured; then print their table, and write it."""
    rows: list[Row] = []
    for some in found:
        add_to_file(json, some)
        rows += some
        print(
            f"measured: {some[0]['op']} {some[0]['shape']}", file=sys.stderr, flush=True
        )
    text = markdown(rows)
    print(text)
    write_file(page, text)
    print(f"written: {json}, {page}")
