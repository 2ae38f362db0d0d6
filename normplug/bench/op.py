"""Time an operation next to torch, once its results were checked against float64.

No wrong result is timed: the yardstick is torch's own error.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normplug._results import stamp
from normplug.bench import timing
from normplug.bench.ops import PASSES, Case, Function, Problem, Tensors
from normplug.bench.rows import Row, Rows, add_to_file
from normplug.reference import accumulator_dtype

OURS, EAGER, COMPILED = "normplug", "eager", "compile"
PROVIDERS = (OURS, EAGER, COMPILED)
# Roundings in the accumulator dtype: of mean, rstd, weight * sqrt(tv) and the gradients' sums, and
# as many again in a truth that is itself float64.
ROUNDINGS_OF_SUMS = 8
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
        AssertionError: a result of normplug is less accurate than `bound` allows.
    """
    problem = Problem(case, device, eps)
    op, gpu = problem.op, device.type == "cuda"
    torch.compiler.reset()  # earlier cases count towards the recompilation limit
    functions: dict[str, Function] = {
        OURS: partial(op.ours, mode=mode),
        EAGER: op.theirs,
        COMPILED: torch.compile(op.theirs, fullgraph=True, dynamic=False),
    }
    functions = {name: functions[name] for name in PROVIDERS if name in providers} | dict(
        others or {}
    )
    stock = problem.results(op.theirs)
    results = _checked(case, problem, mode, functions, stock)
    facts = {
        **case._asdict(),
        "shape": "x".join(map(str, case.shape)),
        "eps": problem.eps,
        "mode": str(mode),
        "copy_gbps": timing.copy_gbps() if gpu else None,
        **stamp(gpu, "liger-kernel", "flag_gems", "quack-kernels", "apex"),
    }
    rows = []
    for direction, passes in zip(("F", "F+B"), PASSES[op.add], strict=True):
        calls = {name: problem.calls(functions[name])[direction] for name in results}
        times = timing.device_us(calls, device)
        walls = times
        if gpu:  # host and GPU, whichever is slower
            walls = timing.in_turns({k: timing.back_to_back(call) for k, call in calls.items()})
        size = passes * problem.leaves["x"].nbytes
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        for name, us in medians.items():
            row = facts | {"direction": direction, "provider": name, "floor_passes": passes}
            row |= timing.spread("us", times[name])
            row |= {"wall_us": statistics.median(walls[name]), "gbps": size / us / 1e3}
            for peer in (EAGER, COMPILED):
                other = None if peer == name else medians.get(peer)
                row[f"over_{peer}"] = other and other / us
            if name != EAGER:
                outputs = results[name].items()
                shown = {k: v for k, v in outputs if direction == "F+B" or k in ("y", "sum")}
                row |= differences(shown, stock)
            rows.append(row)
    return rows


def _checked(
    case: Case, problem: Problem, mode: Any, functions: Mapping[str, Function], stock: Tensors
) -> dict[str, Tensors]:
    """Provider -> its results, of normplug in mode standard, once they are right."""
    truth = problem.truth()
    yardstick = {name: error(value, truth[name]) for name, value in stock.items()}

    def results(name: str, exact: Tensors) -> Tensors:
        found = problem.results(functions[name])
        for key, value in found.items():
            wrong, allowed = error(value, exact[key]), bound(yardstick[key], value.dtype)
            if name != COMPILED and not wrong <= allowed:  # or NaN
                raise AssertionError(
                    f"normplug.bench: {name}, {case}: {key} is wrong: its relative error to "
                    f"float64 is {wrong:.3g}, above {allowed:.3g} (torch has {yardstick[key]:.3g})."
                )
        return found

    checked = {}
    for name in functions:
        if name == OURS:
            results(name, problem.truth(mode))
            found = problem.results(partial(problem.op.ours, mode="standard"))
        else:
            found, _ = timing.attempt(f"{case}: {name}", partial(results, name, truth))
        if found is not None:
            checked[name] = found
    return checked


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


def bound(theirs: float, dtype: torch.dtype) -> float:
    """The largest relative error to allow: twice torch's, plus half a rounding to the dtype.

    And a few roundings to the accumulator dtype: with few channels `theirs` may be small by chance.
    """
    if not dtype.is_floating_point:
        return 0.0
    sums = torch.finfo(accumulator_dtype(dtype)).eps
    return 2.0 * theirs + 0.5 * torch.finfo(dtype).eps + ROUNDINGS_OF_SUMS * sums


def error(value: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm; absolute if the truth is zero."""
    value, truth = value.detach().double(), truth.detach().double()
    size = truth.norm()
    return float((value - truth).norm() / (size if size > 0 else 1.0))


def differences(found: Tensors, theirs: Tensors) -> dict[str, float]:
    """The largest differences of any element from torch's: absolute, and in parts of the output's.

    `max_rel` is relative to the largest element of the same output.
    """
    away = [(value.double() - theirs[name].double()).abs().max() for name, value in found.items()]
    sizes = [theirs[name].double().abs().max() for name in found]
    absolute, size = torch.stack(away), torch.stack(sizes)
    relative = absolute / torch.where(size > 0, size, 1)
    return {"max_abs": absolute.max().item(), "max_rel": relative.max().item()}  # NaN if any is
