"""Time an operation next to torch, once its results were checked against float64."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from normplug._results import stamp
from normplug.bench import timing
from normplug.bench.accuracy import differences, error, require_accurate
from normplug.bench.ops import Case, Function, Problem, Tensors
from normplug.bench.rows import Row, Rows, add_to_file

OURS, EAGER, COMPILED = "normplug", "eager", "compile"
PROVIDERS = (OURS, EAGER, COMPILED)
COLUMNS = {
    **{key: (key, "{}") for key in ("op", "shape", "dtype", "layout", "direction")},
    "": ("provider", "{}"),
    "median us": ("us", "{:.1f}"),
    "20%": ("us_p20", "{:.1f}"),
    "80%": ("us_p80", "{:.1f}"),
    "GB/s": ("gbps", "{:.0f}"),
    "speed-up over PyTorch": ("over_eager", "{:.2f}"),
    "over torch.compile": ("over_compile", "{:.2f}"),
    "largest difference from PyTorch": ("max_abs", "{:.1e}"),
    "relative": ("max_rel", "{:.1e}"),
}


def measure_op(
    case: Case,
    device: torch.device,
    *,
    eps: float | None = None,
    mode: Any = "golden",
    providers: Sequence[str] = PROVIDERS,
    others: Mapping[str, Function] | None = None,
) -> list[Row]:
    """A row for each direction and provider: some of `PROVIDERS`, and `others`.

    `others` are called like an operation's `theirs`. normplug is timed in `mode`; its differences
    from torch are measured in mode standard.

    Raises:
        AssertionError: a result of normplug is less accurate than `accuracy.bound` allows.
    """
    problem = Problem(case, device, eps)
    functions = _checked(case, problem, mode, providers, others or {})
    stock = problem.results(problem.op.theirs)
    gpu = device.type == "cuda"
    facts = {
        **case._asdict(),
        "shape": "x".join(map(str, case.shape)),
        "eps": problem.eps,
        "mode": str(mode),
        "threads": None if gpu else torch.get_num_threads(),
        "copy_gbps": timing.copy_gbps() if gpu else None,
        **stamp(gpu, "liger-kernel", "flag_gems", "quack-kernels", "apex"),
    }
    rows = []
    for direction, passes in problem.op.passes.items():
        calls = {name: problem.calls(each)[direction] for name, (each, _) in functions.items()}
        times = timing.device_us(calls, device)
        walls = timing.wall_us(calls) if gpu else times
        size = passes * problem.leaves["x"].nbytes
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        for name, samples in times.items():
            found = functions[name][1].items()
            ours = {k: v for k, v in found if direction == "F+B" or k in ("y", "sum")}
            row = facts | {"direction": direction, "provider": name, "floor_passes": passes}
            row |= timing.spread("us", samples) | {"repetitions": len(samples)}
            row |= {"wall_us": statistics.median(walls[name]), "gbps": size / medians[name] / 1e3}
            for peer in (EAGER, COMPILED):
                faster = medians[peer] / medians[name] if peer in medians else None
                row[f"over_{peer}"] = faster if name != peer else None
            rows.append(row | (differences(ours, stock) if name != EAGER else {}))
    return rows


def _checked(
    case: Case,
    problem: Problem,
    mode: Any,
    providers: Sequence[str],
    others: Mapping[str, Function],
) -> dict[str, tuple[Function, Tensors]]:
    """Provider -> the function to time, and its results in mode standard."""
    op, truth = problem.op, problem.truth()
    yardstick = {k: error(v, truth[k]) for k, v in problem.results(op.theirs).items()}
    found: dict[str, tuple[Function, Tensors]] = {}
    if OURS in providers:
        ours = partial(op.ours, mode=mode)
        require_accurate(f"{OURS}, {case}", problem.results(ours), problem.truth(mode), yardstick)
        found[OURS] = (ours, problem.results(partial(op.ours, mode="standard")))
    if EAGER in providers:
        found[EAGER] = (op.theirs, {})
    torch.compiler.reset()  # earlier cases count towards the recompilation limit
    more = dict(others)
    if COMPILED in providers:
        more = {COMPILED: torch.compile(op.theirs, fullgraph=True, dynamic=False), **others}

    def checked(name: str, function: Function) -> Tensors:
        results = problem.results(function)
        if name != COMPILED:  # it is torch's own
            require_accurate(f"{name}, {case}", results, truth, yardstick)
        return results

    for name, function in more.items():
        results, _ = timing.attempt(f"{case}: {name}", partial(checked, name, function))
        if results is not None:
            found[name] = (function, results)
    return found


def run(
    cases: Sequence[Case], device: torch.device, path: Path | None, **options: Any
) -> Iterator[Rows]:
    """Measure one case after another, and append its rows to the file `path`.

    A case that does not fit the device's memory is printed and left out.
    """
    for case in cases:
        try:
            rows = measure_op(case, device, **options)
        except torch.OutOfMemoryError:
            print(f"{case}: left out, as it does not fit the memory", file=sys.stderr, flush=True)
        else:
            add_to_file(path, rows)
            yield Rows(rows, COLUMNS)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
