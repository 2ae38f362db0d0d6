"""Compare the kernels of two checkouts: their PTX, and what each launch passes to them.

    python tests/support/ptx.py dump BEFORE  # in one checkout
    python tests/support/ptx.py dump AFTER  # in the other
    python tests/support/ptx.py compare BEFORE AFTER

It needs no GPU. Line numbers are left out of the PTX, so equal kernels give equal files. `--only`
selects launches by a part of their label, which begins with the kernel's name; `--every 4` takes
about a fourth of them. Run both dumps with the same version of Triton. If a kernel differs, dump it
again: Triton 3.3 and 3.6 order two variables of `group_norm_columns_backward` now one way, now the
other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from launches import (
    ALL,
    H100,
    JOIN,
    SHARED,
    SMS,
    batch_call,
    empty,
    group_call,
    programs,
    row_call,
)
from normplug import _kernels
from normplug._ops.batch_norm_plan import (
    PooledPlan,
    StatisticsPlan,
)
from normplug._ops.spec import Pool

BFLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
# One gradient alone: of x, of the residual, of the weight, of the bias.
DX, DRESIDUAL, DWEIGHT, DBIAS, DINPUT_BIAS = (
    tuple(i == j for j in range(5)) for i in range(5)
)
# Shapes for the kernels' every flag, and shapes that are cut in other ways, for some flags.
BATCH_SHAPES = {
    "planes": ((128, 256, 56, 56), False),
    "own rows": ((128, 256, 14, 14), True),
    "small planes": ((64, 512, 7, 7), False),
}
MORE_BATCH_SHAPES = {
    "phases": ((128, 256, 56, 56), True),
    "slab alone": ((64, 512, 1, 1), True),
}
BATCH_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"activation": "relu"},
    "add, relu": {"activation": "relu", "residual": True},
    "add": {"residual": True},
    "add, silu": {"activation": "silu", "residual": True},
    "leaky": {"activation": ("leaky_relu", 0.2)},
    "no vectors": {"vectors": False, "running": False, "activation": "gelu"},
    "not counted": {"tracked": False},
    "cumulative": {"momentum": None},
    "safe": {"safe": True},
    "eval": {
        "training": False,
        "activation": "relu",
        "residual": True,
        "needs": (ALL, DX, DRESIDUAL, DWEIGHT),
    },
    "constant": {"training": False, "activation": "relu", "constant": True},
    "residual's norm": {"for_residual": True, "needs": ()},
    "add norm, relu": {"activation": "relu", "residual": True, "residual_norm": True},
    "add norm, silu": {"activation": "silu", "residual": True, "residual_norm": True},
    "joined": {"join": JOIN, "activation": "relu", "needs": (ALL, DX, DBIAS)},
    "joined, safe": {"join": JOIN, "safe": True},
    "joined, cumulative": {"join": JOIN, "momentum": None},
    "joined, residual's norm": {"join": JOIN, "for_residual": True, "needs": ()},
    "joined, add norm": {
        "join": JOIN,
        "activation": "relu",
        "residual": True,
        "residual_norm": True,
    },
}
POOL = Pool((3, 3), (2, 2), (1, 1), False)


def batch_calls(
    dtype: torch.dtype, shapes: dict[str, Any], calls: dict[str, Any], machine: Any
) -> Iterator[Any]:
    """The labels, plans, tensors and needs of BatchNorms."""
    for (where, (shape, last)), (what, given) in product(shapes.items(), calls.items()):
        options = {name: value for name, value in given.items() if name != "needs"}
        t, spec = batch_call(shape, last, dtype, **options)
        plan = spec.plan(t)
        plan._machine = machine
        yield f"{where}, {what}", plan, t, given.get("needs", (ALL,))


def other_batch_calls(dtype: torch.dtype, machine: Any) -> Iterator[Any]:
    """The calls of the other plans of a BatchNorm."""
    for where, (shape, last) in (BATCH_SHAPES | MORE_BATCH_SHAPES).items():
        t, spec = batch_call(shape, last, dtype, vectors=False, running=False)
        yield f"{where}, statistics", StatisticsPlan(t, spec), t, ()
    for what, given in (
        ("train", {}),
        ("eval", {"training": False}),
        ("no vectors", {"vectors": False}),
        ("joined", {"join": JOIN}),
    ):
        for c in (64, 60) if what == "train" else (64,):
            shape = (64, c, 112, 112)
            t, spec = batch_call(
                shape, True, dtype, activation="relu", pool=POOL, **given
            )
            plan = PooledPlan(t, spec)
            plan._machine = machine
            yield f"pool {c}, {what}", plan, t, (ALL, DX)


ROW_SHAPES = {
    "rows": (4096, 768),
    "wide rows": (512, 131072),
}
MORE_ROW_SHAPES = {
    "narrow rows": (300, 24),
    "shared rows": (4096, 16384),
    "uneven wide rows": (7, 100_000),
}
ROW_CALLS: dict[str, dict[str, Any]] = {
    "plain": {"needs": (ALL, DX, DWEIGHT, DBIAS)},
    "no vectors": {"vectors": False},
    "watched": {"running": True},
    "cumulative": {"running": True, "momentum": None},
    "add": {"residual": True, "running": True},
    "input bias": {"input_bias": True, "needs": (ALL, DX, DINPUT_BIAS)},
    "rms": {"centred": False},
    "rms, watched": {"centred": False, "running": True},
    "rms, add": {"centred": False, "residual": True},
    "rms, rounded": {"centred": False, "weight_offset": 1.0, "rounding": "input"},
    "permuted": {"layout": "permuted"},
    "heads": {"layout": "heads", "centred": False},
    "autocast": {"autocast": BFLOAT16, "autocast_output": "float32"},
}
# Only for rows that a program holds.
MODULATED_CALLS: dict[str, dict[str, Any]] = {
    "gate first": {"centred": False, "gate": "first", "needs": (ALL, DX, DRESIDUAL)},
    "gate last": {"centred": False, "gate": "last", "rounding": "input"},
    "groups": {"centred": False, "gate": "first", "group_size": 96},
    "samples": {"scales": (16, 1, 768), "layout": "samples"},
    "tokens": {"scales": (4096, 768), "needs": (ALL, DWEIGHT)},
}


def row_calls(
    dtype: torch.dtype, shapes: dict[str, Any], calls: dict[str, Any], machine: Any
) -> Iterator[Any]:
    """The labels, plans, tensors and needs of LayerNorms and RMSNorms."""
    for (where, shape), (what, given) in product(shapes.items(), calls.items()):
        options = {
            name: value
            for name, value in given.items()
            if name not in ("layout", "needs")
        }
        t, spec = row_call(rows_of(*shape, dtype, given.get("layout", "")), **options)
        plan = spec.plan(t)
        plan._machine = machine
        yield f"{where}, {what}", plan, t, given.get("needs", (ALL,))


def rows_of(rows: int, width: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Contiguous rows, or rows with two or three levels of strides."""
    if layout == "samples":
        return empty((16, rows // 16, width), dtype)
    if layout == "permuted":
        return empty((16, -(-rows // 16), width), dtype).transpose(0, 1)
    if layout == "heads":
        return empty((4, -(-rows // 32), 24, width), dtype)[:, :, :8].transpose(1, 2)
    return empty((rows, width), dtype)


# Channels, space, groups, and whether channels are adjacent in memory.
GROUP_SHAPES = {
    "tiles": ((16, 320, 64, 64), 32, False),
    "held": ((16, 64, 14, 14), 32, False),
    "held, uneven": ((15, 35, 9, 9), 7, False),
    "solo": ((16, 640, 32, 32), 32, False),
    "items": ((16, 320, 64, 64), 32, True),
    "items of large groups": ((2, 600, 31, 31), 2, True),
    "samples": ((256, 32, 8, 8), 32, True),
}
GROUP_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "silu": {"activation": "silu", "needs": (ALL, DX, DWEIGHT)},
    "leaky": {"activation": ("leaky_relu", 0.2)},
    "no vectors": {"vectors": False},
}


def group_calls(dtype: torch.dtype, calls: dict[str, Any], machine: Any) -> Iterator[Any]:
    """The labels, plans, tensors and needs of GroupNorms."""
    cases = product(GROUP_SHAPES.items(), calls.items())
    for (where, (shape, groups, last)), (what, given) in cases:
        options = {name: value for name, value in given.items() if name != "needs"}
        t, spec = group_call(shape, groups, last, dtype, **options)
        plan = spec.plan(t)
        plan._machine = machine
        yield f"{where}, {what}", plan, t, given.get("needs", (ALL,))


def picked(calls: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: calls[name] for name in names}


def every_call() -> Iterator[Any]:
    """The label, plan, tensors and needs of every call, in the dtypes that kernels differ in."""
    together, alone, rows = (SMS, True), (SMS, False), (SMS, SHARED, True)
    every_batch_shape = BATCH_SHAPES | MORE_BATCH_SHAPES
    every_row_shape = ROW_SHAPES | MORE_ROW_SHAPES
    batch = picked(BATCH_CALLS, "add, relu", "joined, safe")
    more_batch = picked(BATCH_CALLS, "add, silu", "eval", "joined", "no vectors")
    row = picked(ROW_CALLS, "add", "input bias")
    more_row = picked(ROW_CALLS, "add", "rms, rounded", "input bias", "permuted")
    silu = picked(GROUP_CALLS, "silu")
    families = {
        "bfloat16": [
            batch_calls(BFLOAT16, BATCH_SHAPES, BATCH_CALLS, together),
            batch_calls(BFLOAT16, MORE_BATCH_SHAPES, more_batch, together),
            other_batch_calls(BFLOAT16, together),
            row_calls(BFLOAT16, ROW_SHAPES, ROW_CALLS, rows),
            row_calls(BFLOAT16, MORE_ROW_SHAPES, more_row, rows),
            row_calls(BFLOAT16, {"rows": ROW_SHAPES["rows"]}, MODULATED_CALLS, rows),
            group_calls(BFLOAT16, GROUP_CALLS, SMS),
        ],
        "float32": [
            batch_calls(FLOAT32, every_batch_shape, picked(batch, "add, relu"), together),
            row_calls(FLOAT32, every_row_shape, picked(row, "input bias"), rows),
        ],
        "float64": [
            batch_calls(FLOAT64, every_batch_shape, batch, together),
            other_batch_calls(FLOAT64, together),
            row_calls(FLOAT64, ROW_SHAPES, row, rows),
            group_calls(FLOAT64, silu, SMS),
        ],
        "float32, not cooperative": [
            batch_calls(FLOAT32, BATCH_SHAPES, picked(BATCH_CALLS, "add"), alone),
            row_calls(FLOAT32, MORE_ROW_SHAPES, picked(row, "add"), (SMS, SHARED, False)),
        ],
    }
    for dtype, calls in families.items():
        for each in calls:
            for label, *rest in each:
                yield f"{dtype}, {label}", *rest
    with_64_bits = _kernels._INT32
    _kernels._INT32 = 0
    for calls in (
        batch_calls(BFLOAT16, every_batch_shape, picked(batch, "add, relu"), together),
        row_calls(BFLOAT16, ROW_SHAPES, picked(ROW_CALLS, "add", "heads"), rows),
        group_calls(BFLOAT16, silu, SMS),
    ):
        for label, *rest in calls:
            yield f"64 bits, {label}", *rest
    _kernels._INT32 = with_64_bits


def every_launch() -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """For each launch of every call: its label, itself, its job, and what surrounds it."""
    for call, plan, t, needs in every_call():
        for direction, program in programs(plan, t, needs):
            jobs = program.jobs(plan.acc)
            for step, job in zip(program.steps, jobs, strict=True):
                label = f"{job.kernel.__name__}: {call}, {direction}"
                yield (
                    label,
                    step.launch,
                    job,
                    {"slots": step.slots, "scratch": program.scratch},
                )


def facts_of(launch: Any, job: Any, surroundings: dict[str, Any]) -> dict[str, Any]:
    """What a launch passes to its kernel, and how it starts it."""
    names = [name for name in job.kernel.arg_names if not name.endswith("_ptr")]
    numbers = dict(zip(names, launch._numbers, strict=False))
    return {
        "grid": launch._grid,
        "options": job.options,
        "pointers": launch.pointers,
        "numbers": numbers,
        **surroundings,
    }


def compile_ptx(job: Any) -> str:
    """The PTX of a job."""
    kernel = triton.compile(ASTSource(*job[:4]), target=H100, options=job.options)
    return kernel.asm["ptx"]


def _skip_the_assembler() -> None:
    """Have Triton stop at the PTX."""
    add_stages = CUDABackend.add_stages

    def without_assembler(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(backend, stages, *rest)
        stages["cubin"] = lambda ptx, metadata: b""

    CUDABackend.add_stages = without_assembler


def _dump_share(folder: Path, labels: set[str], share: int, shares: int) -> None:
    """Compile the kernels of one process's share of the jobs."""
    seen: dict[str, tuple[int, str]] = {}
    _skip_the_assembler()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        for label, _, job, _ in every_launch():
            if label not in labels:
                continue
            key = job.key
            if key not in seen:
                number = len(seen)
                seen[key] = number, compile_ptx(job) if number % shares == share else ""
            number, ptx = seen[key]
            if number % shares == share:
                (folder / f"{label}.ptx").write_text(ptx)


def dump(folder: Path, only: str, every: int, processes: int) -> None:
    """Write the PTX and the facts of the selected launches."""
    folder.mkdir(parents=True)
    facts = {
        label: facts_of(launch, job, surroundings)
        for label, launch, job, surroundings in every_launch()
        if only in label and crc32(label.encode()) % every == 0
    }
    (folder / "launches.json").write_text(json.dumps(facts, indent=1, default=str))
    context = get_context("fork")
    workers = [
        context.Process(target=_dump_share, args=(folder, set(facts), share, processes))
        for share in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("A kernel does not compile.")
    print(f"{len(facts)} launches with Triton {triton.__version__}")


def compare(before: Path, after: Path) -> list[str]:
    """The differences between two dumps, in words; launches that one of them lacks are skipped."""
    one = json.loads((before / "launches.json").read_text())
    other = json.loads((after / "launches.json").read_text())
    differences = []
    for label in sorted(one.keys() & other.keys()):
        for fact, value in one[label].items():
            if other[label][fact] != value:
                differences.append(
                    f"{label}: {fact}: {value} became {other[label][fact]}"
                )
        if (before / f"{label}.ptx").read_text() != (after / f"{label}.ptx").read_text():
            differences.append(f"{label}: the PTX differs")
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for_dump = commands.add_parser(
        "dump", help="write the PTX of every launch into a new folder"
    )
    for_dump.add_argument("folder", type=Path)
    for_dump.add_argument("--only", default="")
    for_dump.add_argument("--every", type=int, default=1)
    for_dump.add_argument("--processes", type=int, default=2)
    for_compare = commands.add_parser(
        "compare", help="name the differences between two folders"
    )
    for_compare.add_argument("before", type=Path)
    for_compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "dump":
        dump(arguments.folder, arguments.only, arguments.every, arguments.processes)
        return
    differences = compare(arguments.before, arguments.after)
    print("\n".join(differences) or "no difference")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
