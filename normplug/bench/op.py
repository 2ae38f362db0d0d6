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
from normplug.bench.ops import Case, Function, Problem
from normplug.bench.rows import Row, Rows, add_to_file

OURS, EAGER, COMPILED = "normplug", "eager", "compile"
PROVIDERS = (OURS, EAGER, COMPILED)
COLUMNS = {
    "op": ("op", "{}"),
    "shape": ("shape", "{}"),
    "dtype": ("dtype", "{}"),
    "layout": ("layout", "{}"),
    "direction": ("direction", "{}"),
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
    facts = {
        **case._asdict(),
        "shape": "x".join(map(str, case.shape)),
        "eps": problem.eps,
        "mode": str(mode),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "copy_gbps": timing.copy_gbps() if device.type == "cuda" else None,
        **stamp(device.type == "cuda", *_packages(others or {})),
    }
    rows = []
    for direction, passes in problem.op.passes.items():
        calls = {name: problem.calls(each)[direction] for name, (each, _) in functions.items()}
        times = timing.device_us(calls, device)
        walls = timing.wall_us(calls) if device.type == "cuda" else times
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


def _packages(others: Mapping[str, Function]) -> list[str]:
    return [{"quack": "quack-kernels", "liger": "liger-kernel"}.get(name, name) for name in others]


def _checked(
    case: Case,
    problem: Problem,
    mode: Any,
    providers: Sequence[str],
    others: Mapping[str, Function],
) -> dict[str, tuple[Function, dict[str, torch.Tensor]]]:
    """Provider -> the function to time, and its results in mode standard."""
    theirs: Function = problem.op.theirs
    found: dict[str, tuple[Function, dict[str, torch.Tensor]]] = {}
    truth = problem.truth()
    yardstick = {k: error(v, truth[k]) for k, v in problem.results(theirs).items()}
    if OURS in providers:
        ours = partial(problem.op.ours, mode=mode)
        exact, results = problem.truth(mode), problem.results(ours)
        require_accurate(f"{OURS}, {case}", results, exact, yardstick)
        found[OURS] = (ours, problem.results(partial(problem.op.ours, mode="standard")))
        del exact, results
    if EAGER in providers:
        found[EAGER] = (theirs, {})
    torch.compiler.reset()  # earlier cases count towards the recompilation limit
    more = {COMPILED: torch.compile(theirs, fullgraph=True, dynamic=False), **others}
    if COMPILED not in providers:
        del more[COMPILED]
    for name, function in more.items():
        try:
            found[name] = (function, problem.results(function))
            if name != COMPILED:  # it is torch's own
                require_accurate(f"{name}, {case}", found[name][1], truth, yardstick)
        except Exception as why:  # of any kind, such as no compiler: others must not stop a run
            found.pop(name, None)
            reason = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}"
            print(f"{case}: {name} is left out: {reason}", file=sys.stderr, flush=True)
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
