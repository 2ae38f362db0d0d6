"""Time GroupNorm's schedules on a GPU: a JSON line for each variant, then the best of each case.

    NORMPLUG_COMPILE_WORKERS=16 python benchmarks/tune_group_norm.py [CASE ...] [--out FILE]

CASE is part of a case's name, such as `gn_silu 16x320 NHWC`; all by default. Kernels are compiled
beforehand in other processes. Every variant's results are checked against torch in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from normplug._files import stamp
from normplug._kernels import ahead, power_of_2, unit_of
from normplug._kernels.group_norm import schedule
from normplug._kernels.group_norm.schedule import (
    GroupColumns,
    PlanesBackward,
    PlanesForward,
)
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.group_norm_plan import GroupNormPlan
from normplug._ops.spec import Tensors
from normplug.bench.op import error
from normplug.bench.timing import copy_gbps, gpu_stopwatch

GPU = torch.device("cuda")
CASES = [
    (
        f"{op} {'x'.join(map(str, shape))} {layout} {dtype}",
        shape,
        groups,
        activation,
        layout,
        dtype,
    )
    for op, shape, groups, activation, layouts in [
        ("gn_silu", (16, 320, 64, 64), 32, "silu", ("NCHW", "NHWC")),
        ("gn_silu", (16, 640, 32, 32), 32, "silu", ("NCHW", "NHWC")),
        ("gn_silu", (16, 1280, 16, 16), 32, "silu", ("NCHW", "NHWC")),
        ("gn_silu", (4, 128, 512, 512), 32, "silu", ("NCHW", "NHWC")),
        ("in3d", (2, 32, 128, 128, 128), 32, None, ("NHWC",)),
    ]
    for layout in layouts
    for dtype in ("bfloat16", "float32")
]
LAGS = (12, 48, 96, 192, 384)  # KiB per multiprocessor
NEEDS = (True, False, True, True, False)  # gradients of x, weight and bias


def lag_of(shape, kib, sms, itemsize):
    """The lag for `kib` KiB per multiprocessor on top of a unit."""
    if isinstance(shape, GroupColumns):
        values = shape.rows_each * shape.bc
        at_once, most = shape.slabs * shape.k, shape.units * shape.k
    elif isinstance(shape, PlanesForward):
        values, at_once, most = shape.block, shape.k, shape.n * shape.groups * shape.k
    else:
        values, at_once = shape.cb * shape.sb, shape.k
        most = shape.n * shape.groups * shape.k
    return min(sms * (kib << 10) // (values * itemsize) + at_once, most)


def lagged(shape, kib, sms, itemsize):
    return dataclasses.replace(shape, lag=lag_of(shape, kib, sms, itemsize))


def planes_forward(base, sms, itemsize):
    width = base.channels * base.hw
    for block, warps in itertools.product((2048, 4096, 8192, 16384), (2, 4, 8)):
        if 512 <= block // warps <= 4096 and block < 2 * width:
            run = min(base.hw & -base.hw, block)
            shape = dataclasses.replace(
                base, block=block, run=run, warps=warps, r=1, lag=1
            )
            yield lagged(shape, 24, sms, itemsize)
    tiles = itertools.product((1024, 2048, 4096, 8192), (2, 4, 8, 16), (1, 2, 3))
    for block, warps, stages in tiles:  # one program reads a group twice
        if 256 <= block // warps <= 2048 and block < width:
            made = {
                "block": block,
                "run": min(base.hw & -base.hw, block),
                "stages": stages,
            }
            yield dataclasses.replace(base, warps=warps, r=1, lag=0, **made)
    padded = power_of_2(width)
    if padded <= 65536:
        for warps in (4, 8, 16, 32):
            if 256 <= padded // warps <= 2048:
                run = min(base.hw & -base.hw, padded)
                yield dataclasses.replace(
                    base, block=padded, run=run, warps=warps, r=1, lag=0
                )


def planes_backward(base, sms, itemsize):
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)):
        if not 256 <= block // warps <= 2048:
            continue
        sbs = {min(power_of_2(base.hw), block) >> i for i in range(3)}
        for sb in sorted(sb for sb in sbs if sb >= 128):
            cb = min(block // sb, power_of_2(base.channels))
            if cb * sb == block:
                shape = dataclasses.replace(
                    base, cb=cb, sb=sb, warps=warps, r=1, splits=1, lag=1
                )
                yield lagged(shape, 24, sms, itemsize)
    cb, sb = power_of_2(base.channels), power_of_2(base.hw)
    if cb * sb <= 32768:
        for warps, splits in itertools.product(
            (8, 16, 32), {base.n, max(base.n // 2, 1)}
        ):
            if 256 <= cb * sb // warps <= 2048:
                yield dataclasses.replace(
                    base, cb=cb, sb=sb, warps=warps, r=1, splits=splits, lag=0
                )


def columns(base, sms, itemsize):
    kinds = ((4, 8), (4, 4), (4, 2), (2, 8), (2, 4), (8, 4))  # warps, u
    for bc, (warps, u), stages in itertools.product((32, 64, 128), kinds, (1, 3)):
        if base.c % bc:
            continue
        tile = max(warps * 32 * min(16 // itemsize, unit_of(base.c)) // bc, 1) * u
        made = dataclasses.replace(
            base, bc=bc, bt=tile // u, u=u, warps=warps, stages=stages
        )
        for tiles in (1, 2, 4, 8, 16):
            shape = dataclasses.replace(made, rows_each=tiles * tile)
            if shape.units * shape.k >= 256 and tiles * tile <= base.s:
                yield lagged(shape, 24, sms, itemsize)


def variants(base, sms, itemsize):
    kinds = {
        PlanesForward: planes_forward,
        PlanesBackward: planes_backward,
        GroupColumns: columns,
    }
    found = [base, *kinds[type(base)](base, sms, itemsize)]
    return [shape for i, shape in enumerate(found) if shape not in found[:i]]


class Sweep:
    """The schedules of a case; `emit` takes a row for each."""

    def __init__(self, case, emit):
        self.name, shape, groups, activation, layout, dtype = case
        self.emit = emit
        generator = torch.Generator("cuda").manual_seed(0)

        def image():
            t = torch.randn(shape, generator=generator, device="cuda").to(
                getattr(torch, dtype)
            )
            if layout == "NCHW":
                return t
            last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
            return t.contiguous(memory_format=last)

        kind = {"device": "cuda", "dtype": getattr(torch, dtype)}
        weight, bias = (torch.rand(shape[1], **kind) + 0.5 for _ in range(2))
        self.itemsize = weight.itemsize
        self.t, self.dy = Tensors(image().mul_(2).add_(3), None, weight, bias), image()
        self.spec = GroupNormSpec(groups, 1e-5, 1.0, activation)
        self.saved = GroupNormPlan(self.t, self.spec).forward(self.t, True)[1]

    def plan(self, direction, choose):
        """A plan with the schedule that `choose` returns; workers compile its kernel."""
        plan = GroupNormPlan(self.t, self.spec)
        with patch.object(schedule, f"group_norm_{direction}", choose):
            if direction == "forward":
                program = plan.forward_of(self.t, True)
            else:
                program = plan.backward_of(self.saved, self.dy, None, NEEDS)
        for job in program.jobs(plan.acc):
            ahead.expect(job)
        return plan

    def call(self, direction, plan):
        if direction == "forward":
            return (plan.forward(self.t, True)[0],)
        return [
            t for t in plan.backward(self.saved, self.dy, None, NEEDS) if t is not None
        ]

    def measured(self, direction, passes, shape, plan, truth):
        """Microseconds of a schedule; infinite if it fails or is wrong."""
        row = {
            "case": self.name,
            "direction": direction,
            "shape": dataclasses.asdict(shape),
        }
        us = math.inf
        try:
            run = partial(self.call, direction, plan)
            row["error"] = max(map(error, run(), truth))
            if row["error"] < 1e-2:
                us = row["us"] = statistics.median(gpu_stopwatch(run)())
                row["percent"] = (
                    100 * passes * self.t.x.nbytes / us / 1e3 / copy_gbps(GPU)
                )
        except Exception as failure:
            row["failed"] = repr(failure)[:200]
        self.emit(row)
        return us

    def sweep(self, direction, passes, truth):
        sizes = []  # what the rule is asked, by a plan with the rule's schedule
        rule = getattr(schedule, f"group_norm_{direction}")
        self.plan(direction, lambda *asked: sizes.append(asked) or rule(*asked))
        base, sms = rule(*sizes[0]), sizes[0][-1]

        def planned(
            shapes,
        ):
            # Before any is measured, so that workers compile them meanwhile.
            return [
                (shape, self.plan(direction, lambda *_, s=shape: s)) for shape in shapes
            ]

        def timed(pairs):  # (microseconds, schedule), in the order of the pairs
            return [
                (self.measured(direction, passes, s, plan, truth), s) for s, plan in pairs
            ]

        found = timed(planned(variants(base, sms, self.itemsize)))
        fastest = sorted(found, key=lambda pair: pair[0])
        # The lag is not compiled in.
        for shape in [shape for _, shape in fastest if shape.lag][:3]:
            others = (lagged(shape, kib, sms, self.itemsize) for kib in LAGS)
            found += timed(
                planned([s for s in others if s not in [each for _, each in found]])
            )
        us, best = min(found, key=lambda pair: pair[0])
        row = {"best of": f"{self.name} {direction}", "rule us": found[0][0], "us": us}
        self.emit(row | {"shape": dataclasses.asdict(best)})

    def run(self):
        leaves = [
            t.float().requires_grad_() for t in (self.t.x, self.t.weight, self.t.bias)
        ]
        y = F.group_norm(leaves[0], self.spec.groups, *leaves[1:], self.spec.eps)
        y = F.silu(y) if self.spec.activation else y
        gradients = torch.autograd.grad(y, leaves, self.dy.float())
        self.sweep("forward", 2, [y.detach()])
        self.sweep("backward", 3, gradients)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", default="gn_sweep.jsonl")
    options = parser.parse_args()
    origin = stamp(gpu=True) | {"copy_gbps": round(copy_gbps(GPU))}
    with open(options.out, "a") as out:

        def emit(row):
            line = json.dumps(row | origin)
            print(line, file=out, flush=True)
            if "best of" in row:
                print(line, flush=True)

        for case in CASES:
            if not options.cases or any(part in case[0] for part in options.cases):
                Sweep(case, emit).run()


if __name__ == "__main__":
    main()
