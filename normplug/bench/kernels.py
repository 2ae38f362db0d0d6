"""Time the norms against the same work in torch and other packages."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from normplug import target_variance
from normplug._report.provenance import hardware
from normplug.bench import batch_norm, group_norm, layer_norm, native, rivals, rms_norm
from normplug.bench.accuracy import (
    NEAR,
    is_far,
    largest_difference,
    relative_errors,
    require_accurate,
)
from normplug.bench.op import Function, Op, Problem
from normplug.bench.results import KERNELS, Results, Row, spread
from normplug.bench.suites import DTYPES, Case, Shape, layouts, shape_name
from normplug.bench.timing import HostTime, Stopwatch, cpu_us

OPS = {op.name: op for op in (*batch_norm.OPS, *layer_norm.OPS, *rms_norm.OPS, *group_norm.OPS)}
OURS = {"normplug": "auto", "normplug-triton": "triton"}  # provider -> backend
PROVIDERS = (*OURS, "eager", "compile", "cudnn")
CPU = "cpu"  # the provider that is torch eager on the processor


class Candidate(NamedTuple):
    """A function to time.

    Attributes:
        function: takes a problem's tensors by name.
        differences: direction -> the largest difference from eager; empty for eager itself.
    """

    function: Function
    differences: dict[str, float]


def own_cases(
    shapes: Sequence[Shape], ops: Sequence[str] | None, dtypes: Sequence[str] | None
) -> list[Case]:
    """Every operation that takes a shape, in each layout and dtype.

    Raises:
        ValueError: one of `ops` does not take one of the shapes, or no operation does.
    """
    cases = []
    for shape in shapes:
        refusals = {name: OPS[name].refusal(shape) for name in ops or OPS}
        fits = [name for name, refusal in refusals.items() if refusal is None]
        if not fits or (ops and len(fits) < len(refusals)):
            name, refusal = next((name, why) for name, why in refusals.items() if why)
            raise ValueError(f"{name} {refusal}; got --shape {shape_name(shape)}.")
        cases += [
            Case(name, layout, shape, dtype)
            for name in fits
            for layout in layouts(name, shape)
            for dtype in dtypes or DTYPES
        ]
    return cases


def run(cases: Iterable[Case], providers: Collection[str], json: Path | None) -> Results:
    """Measure and print every case that fits the GPU; write the rows to `json`, if it is given."""
    native.build()
    stopwatch = Stopwatch()
    facts: Row = {"cpu": hardware(gpu=False, processes=1)} if CPU in providers else {}
    copy_gbps = stopwatch.copy_gbps()
    results = Results(json, KERNELS, rivals.DISTRIBUTIONS, copy_gbps=copy_gbps, **facts)
    content = results.content
    print(f"{content['device']}, copy {copy_gbps:.0f} GB/s, {content['versions']}")
    for case in cases:
        with memory_for(case):
            for rows in measure(case, providers, stopwatch, copy_gbps, "cuda"):
                content["native"] = native.status()  # known only after the first call of a kernel
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
    candidates = accurate_candidates(case, op, problem, providers)
    on_the_cpu = op.make(case, "cpu").calls(op.eager) if CPU in providers else {}
    facts: dict[str, Row] = {"eager": dict(op.eager_facts(problem))}
    for direction, passes in op.passes.items():
        calls = {name: problem.calls(each.function)[direction] for name, each in candidates.items()}
        times, host = stopwatch.gpu_us(calls), stopwatch.host_time(calls)
        if on_the_cpu:
            times[CPU] = cpu_us(on_the_cpu[direction])
            host[CPU] = HostTime(*[statistics.median(times[CPU])] * 2)  # the host does all the work
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
        for name, each in candidates.items():
            if each.differences:
                facts[name] = {**facts.get(name, {}), "difference": each.differences[direction]}
        yield [
            {
                **measured,
                "provider": name,
                **figures(floor, samples, copy_gbps),
                **host[name]._asdict(),
                **facts.get(name, {}),
            }
            for name, samples in times.items()
        ]


def accurate_candidates(
    case: Case, op: Op, problem: Problem, providers: Collection[str]
) -> dict[str, Candidate]:
    """The functions to time: normplug's with a kernel for the problem, torch's, and correct rivals.

    normplug is timed in mode golden, and compared with eager in mode standard.
    """
    stock = problem.outputs(op.eager)
    yardstick = relative_errors(stock, op.truth(problem, 1.0))
    candidates: dict[str, Candidate] = {}

    def checked(name: str, function: Function, variance: float) -> None:
        outputs = problem.outputs(function)
        require_accurate(f"{name}, {case}", outputs, op.truth(problem, variance), yardstick)

    def add(name: str, function: Function, stock_function: Function) -> None:
        outputs = problem.outputs(stock_function)
        of_direction = {"F": tuple(problem.gradients), "F+B": tuple(stock)}
        differences = {
            direction: largest_difference(outputs, stock, names)
            for direction, names in of_direction.items()
        }
        candidates[name] = Candidate(function, differences)

    for name in [name for name in OURS if name in providers]:
        with contextlib.suppress(NotImplementedError):  # it has no kernel
            golden = partial(op.normplug, backend=OURS[name])
            checked(name, golden, target_variance("golden"))
            add(name, golden, partial(golden, mode="standard"))
    if "eager" in providers:
        candidates["eager"] = Candidate(op.eager, {})
    if "compile" in providers:
        torch.compiler.reset()  # earlier cases count towards the recompilation limit
        compiled = torch.compile(op.eager, fullgraph=True, dynamic=False)
        add("compile", compiled, compiled)
    for name in [name for name in op.rivals if name in providers]:
        try:
            rival = op.rivals[name]()
            checked(name, rival, 1.0)
            add(name, rival, rival)
        except Exception as error:  # of any kind: a rival must not stop the run
            print(f"{case}: {name} is left out: {error!r}", file=sys.stderr, flush=True)
    return candidates


def floor_bytes(case: Case, passes: int) -> int:
    """The fewest bytes that must be moved, not counting statistics and parameters."""
    return passes * math.prod(case.shape) * getattr(torch, case.dtype).itemsize


def figures(floor: int, samples_us: list[float], copy_gbps: float) -> Row:
    """The median and spread of the repetitions, and the bandwidth that `floor` bytes imply."""
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
        f"host {row['host_us']:.0f} us{_difference(row)}"
        for row in rows
    ]
    return f"{str(case):<44} {rows[0]['direction']:<3} | {' | '.join(cells)}"


def _difference(row: Row) -> str:
    if "difference" not in row:
        return ""
    return f", differs by {row['difference']:.1e}{f' (> {NEAR:g})' if is_far(row) else ''}"
