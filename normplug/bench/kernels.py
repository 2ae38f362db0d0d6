"""Measure the norms next to what torch and other packages have for the same work."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from normplug import target_variance
from normplug.bench import batch_norm, group_norm, layer_norm, rms_norm
from normplug.bench.accuracy import relative_errors, require_accurate
from normplug.bench.op import Function, Op, Problem
from normplug.bench.results import Results, Row, spread
from normplug.bench.suites import Case
from normplug.bench.timing import Stopwatch

OPS = {op.name: op for op in (*batch_norm.OPS, *layer_norm.OPS, *rms_norm.OPS, *group_norm.OPS)}
OURS = {"normplug": "auto", "normplug-triton": "triton"}  # provider -> backend
PROVIDERS = (*OURS, "eager", "compile")


def run(cases: Iterable[Case], providers: Collection[str], json: Path | None) -> Results:
    """Measure and print every case that fits the GPU; write the rows to `json`, if it is given."""
    stopwatch = Stopwatch()
    results = Results(json, copy_gbps=stopwatch.copy_gbps())
    content = results.content
    print(f"{content['device']}, copy {content['copy_gbps']:.0f} GB/s, {content['versions']}")
    for case in cases:
        with memory_for(case):
            for rows in measure(case, providers, stopwatch, content["copy_gbps"], "cuda"):
                for row in rows:
                    results.add(row)
                print(line(case, rows) if rows else f"{case}: no kernel", flush=True)
    return results


@contextlib.contextmanager
def memory_for(case: Case) -> Iterator[None]:
    """Print and skip a case that does not fit; free its memory for the next."""
    try:
        yield
    except torch.OutOfMemoryError:
        print(f"{case}: skipped, as it does not fit the GPU's memory", file=sys.stderr, flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def measure(
    case: Case, providers: Collection[str], stopwatch: Stopwatch, copy_gbps: float, device: str
) -> Iterator[list[Row]]:
    """Yield the rows of each direction: one for each provider that has a kernel for the case.

    Raises:
        AssertionError: one of our kernels is less accurate than `accuracy.bound` allows.
    """
    op = OPS[case.op]
    problem = op.make(case, device)
    functions = accurate_functions(case, op, problem, providers)
    facts = {"eager": op.eager_facts(problem)}
    for direction, passes in op.passes.items():
        calls = {name: problem.calls(call)[direction] for name, call in functions.items()}
        gpu, host = stopwatch.gpu_us(calls), stopwatch.host_time(calls)
        floor = floor_bytes(case, passes)
        measured = {
            "op": case.op,
            "direction": direction,
            "layout": case.layout,
            "shape": list(case.shape),
            "dtype": case.dtype,
            "floor_passes": passes,
            "floor_bytes": floor,
        }
        yield [
            {
                **measured,
                "provider": name,
                **figures(floor, gpu[name], copy_gbps),
                **host[name]._asdict(),
                **facts.get(name, {}),
            }
            for name in calls
        ]


def accurate_functions(
    case: Case, op: Op, problem: Problem, providers: Collection[str]
) -> dict[str, Function]:
    """Ours that have a kernel for the problem, torch's, and the rivals whose results are right."""
    yardstick = relative_errors(problem.outputs(op.eager), op.truth(problem, 1.0))
    functions: dict[str, Function] = {}

    def add(name: str, function: Function, variance: float) -> None:
        outputs = problem.outputs(function)
        require_accurate(f"{name}, {case}", outputs, op.truth(problem, variance), yardstick)
        functions[name] = function

    for name in [name for name in OURS if name in providers]:
        with contextlib.suppress(NotImplementedError):  # it has no kernel
            add(name, partial(op.normplug, backend=OURS[name]), target_variance("golden"))
    if "eager" in providers:
        functions["eager"] = op.eager
    if "compile" in providers:
        torch.compiler.reset()  # earlier cases count towards the limit of recompilations
        functions["compile"] = torch.compile(op.eager, fullgraph=True, dynamic=False)
    for name in [name for name in op.rivals if name in providers]:
        try:
            add(name, op.rivals[name](), 1.0)
        except Exception as error:  # of any kind: a rival must not stop the run
            print(f"{case}: {name} is left out: {error!r}", file=sys.stderr, flush=True)
    return functions


def floor_bytes(case: Case, passes: int) -> int:
    """The fewest bytes to move; vectors of statistics and parameters do not count."""
    return passes * math.prod(case.shape) * getattr(torch, case.dtype).itemsize


def figures(floor: int, samples_us: list[float], copy_gbps: float) -> Row:
    """Median and spread of the repetitions, and the speed at which the floor's bytes moved."""
    times = spread("us", samples_us)
    gbps = floor / times["us"] / 1e3
    return {
        **times,
        "repetitions": len(samples_us),
        "gbps": gbps,
        "percent_of_copy": 100 * gbps / copy_gbps,
    }


def line(case: Case, rows: list[Row]) -> str:
    """The rows of a case and direction as one line of text."""
    cells = [
        f"{row['provider']} {row['us']:.1f} us {row['percent_of_copy']:.0f}% "
        f"host {row['host_us']:.0f} us"
        for row in rows
    ]
    return f"{str(case):<44} {rows[0]['direction']:<3} | {' | '.join(cells)}"
