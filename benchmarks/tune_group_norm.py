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
import statistics
import time

import torch
import torch.nn.functional as F

from normplug._kernels import ahead, power_of_2, unit_of
from normplug._kernels.group_norm import schedule
from normplug._kernels.group_norm.schedule import Columns, PlanesBackward, PlanesForward
from normplug._ops.group_norm import GroupNormPlan, GroupNormSpec
from normplug._ops.plans import BLANKS, SLOT, SLOTS
from normplug._ops.spec import Tensors
from normplug._results import stamp
from normplug.bench.timing import copy_gbps, gpu_stopwatch

CASES = [
    (f"{op} {'x'.join(map(str, shape))} {layout} bf16", shape, groups, activation, layout)
    for op, shape, groups, activation, layouts in [
        ("gn_silu", (16, 320, 64, 64), 32, "silu", ("NCHW", "NHWC")),
        ("gn_silu", (16, 640, 32, 32), 32, "silu", ("NCHW", "NHWC")),
        ("gn_silu", (16, 1280, 16, 16), 32, "silu", ("NCHW", "NHWC")),
        ("gn_silu", (4, 128, 512, 512), 32, "silu", ("NCHW", "NHWC")),
        ("in3d", (2, 32, 128, 128, 128), 32, None, ("NHWC",)),
    ]
    for layout in layouts
]
LAGS = (12, 48, 96, 192, 384)  # KiB per multiprocessor


def lag_of(shape, kib, sms):
    """The lag for `kib` KiB per multiprocessor on top of a unit."""
    if isinstance(shape, Columns):
        values = shape.rows_each * shape.bc
        at_once, most = shape.slabs * shape.k, shape.units * shape.k
    elif isinstance(shape, PlanesForward):
        values, at_once, most = shape.block, shape.k, shape.n * shape.groups * shape.k
    else:
        values, at_once = shape.cb * shape.sb, shape.k
        most = shape.n * shape.groups * shape.k
    return min(sms * (kib << 10) // (values * 2) + at_once, most)


def lagged(shape, kib, sms):
    return dataclasses.replace(shape, lag=lag_of(shape, kib, sms))


def planes_forward(base, sms):
    width = base.channels * base.hw
    for block, warps in itertools.product((2048, 4096, 8192, 16384), (2, 4, 8)):
        if 512 <= block // warps <= 4096 and block < 2 * width:
            run = min(base.hw & -base.hw, block)
            shape = dataclasses.replace(base, block=block, run=run, warps=warps, r=1, lag=1)
            yield lagged(shape, 24, sms)
    padded = power_of_2(width)
    if padded <= 65536:
        for warps in (4, 8, 16, 32):
            if 256 <= padded // warps <= 2048:
                run = min(base.hw & -base.hw, padded)
                yield dataclasses.replace(base, block=padded, run=run, warps=warps, r=1, lag=0)


def planes_backward(base, sms):
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)):
        if not 256 <= block // warps <= 2048:
            continue
        sbs = {min(power_of_2(base.hw), block) >> i for i in range(3)}
        for sb in sorted(sb for sb in sbs if sb >= 128):
            cb = min(block // sb, power_of_2(base.channels))
            if cb * sb == block:
                shape = dataclasses.replace(base, cb=cb, sb=sb, warps=warps, r=1, splits=1, lag=1)
                yield lagged(shape, 24, sms)
    cb, sb = power_of_2(base.channels), power_of_2(base.hw)
    if cb * sb <= 32768:
        for warps, splits in itertools.product((8, 16, 32), {base.n, max(base.n // 2, 1)}):
            if 256 <= cb * sb // warps <= 2048:
                yield dataclasses.replace(
                    base, cb=cb, sb=sb, warps=warps, r=1, splits=splits, lag=0
                )


def columns(base, sms):
    itemsize = 2
    kinds = ((4, 8), (4, 4), (4, 2), (2, 8), (2, 4), (8, 4))  # warps, u
    for bc, (warps, u), stages in itertools.product((32, 64, 128), kinds, (1, 3)):
        if base.c % bc:
            continue
        tile = max(warps * 32 * min(16 // itemsize, unit_of(base.c)) // bc, 1) * u
        made = dataclasses.replace(base, bc=bc, bt=tile // u, u=u, warps=warps, stages=stages)
        for tiles in (1, 2, 4, 8, 16):
            shape = dataclasses.replace(made, rows_each=tiles * tile)
            if shape.units * shape.k >= 256 and tiles * tile <= base.s:
                yield lagged(shape, 24, sms)


def variants(base, sms):
    kinds = {PlanesForward: planes_forward, PlanesBackward: planes_backward, Columns: columns}
    found = [base, *kinds[type(base)](base, sms)]
    return list(dict.fromkeys(found))


class Sweep:
    def __init__(self, case, emit):
        self.name, shape, groups, activation, layout = case
        self.emit = emit
        generator = torch.Generator("cuda").manual_seed(0)

        def image():
            t = torch.randn(shape, generator=generator, device="cuda").bfloat16()
            if layout == "NCHW":
                return t
            last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
            return t.contiguous(memory_format=last)

        c = shape[1]
        self.activation, self.groups = activation, groups
        weight, bias = (torch.rand(c, device="cuda") + 0.5 for _ in range(2))
        self.dy = image()
        self.t = Tensors(image().mul_(2).add_(3), None, weight.bfloat16(), bias.bfloat16())
        self.spec = GroupNormSpec(groups, 1e-5, 1.0, activation)
        self.plan = GroupNormPlan(self.t, self.spec)
        self.sms = self.plan._machine
        self.saved = None
        self.bytes = self.t.x.numel() * 2

    def eager(self, x, weight, bias):
        y = F.group_norm(x, self.groups, weight, bias, 1e-5)
        return F.silu(y) if self.activation else y

    def program(self, direction, shape):
        """The launches for one schedule."""
        name = f"group_norm_{direction}"
        chosen = getattr(schedule, name)
        setattr(schedule, name, lambda *sizes: shape)
        try:
            if direction == "forward":
                return self.plan.forward_program(self.t, True)
            pairs = zip(self.plan.saved_slots, self.saved, strict=True)
            named = {SLOTS[slot]: t for slot, t in pairs if t is not None}
            needs = (True, False, True, True, False)
            return self.plan.backward_program(named, self.dy, None, needs)
        finally:
            setattr(schedule, name, chosen)

    def call(self, direction, program):
        def run():
            if direction == "forward":
                slots = [*self.t, *BLANKS]
            else:
                slots = [None] * len(SLOTS)
                for slot, t in zip(self.plan.saved_slots, self.saved, strict=True):
                    slots[slot] = t
                slots[SLOT["dy"]] = self.dy
            program.run(slots, self.plan)
            return slots

        return run

    def right(self, slots, truth):
        for name, exact in truth.items():
            ours = slots[SLOT[name]].float()
            error = float((ours - exact).norm() / exact.norm().clamp_min(1e-30))
            if not error < 1e-2:
                return f"{name}: error {error:.2g}"
        return None

    def measured(self, direction, passes, shape, program, truth):
        row = {"case": self.name, "direction": direction, "shape": dataclasses.asdict(shape)}
        row["held"] = shape.lag == 0
        try:
            run = self.call(direction, program)
            wrong = self.right(run(), truth)
            torch.cuda.synchronize()
            if wrong:
                row["wrong"] = wrong
            else:
                row["us"] = statistics.median(gpu_stopwatch(run)())
                row["percent"] = 100 * passes * self.bytes / row["us"] / 1e3 / copy_gbps()
        except Exception as error:
            row["failed"] = repr(error)[:200]
        self.emit(row)
        return row

    def sweep(self, direction, passes, truth, deadline):
        choose = getattr(schedule, f"group_norm_{direction}")
        base = choose(*self.plan._shape, self.sms)
        programs = {shape: self.program(direction, shape) for shape in variants(base, self.sms)}
        for program in programs.values():
            for job in program.jobs(self.plan.acc):
                ahead.expect(job)
        rows = []
        for shape, program in programs.items():
            if rows and time.monotonic() > deadline:
                break
            rows.append((shape, self.measured(direction, passes, shape, program, truth)))
        good = sorted((pair for pair in rows if "us" in pair[1]), key=lambda pair: pair[1]["us"])
        # The lag is not compiled in.
        for shape, _ in [pair for pair in good if pair[0].lag][:3]:
            for kib in LAGS:
                other = lagged(shape, kib, self.sms)
                if other != shape:
                    program = self.program(direction, other)
                    row = self.measured(direction, passes, other, program, truth)
                    rows.append((other, row))
        good = [row for _, row in rows if "us" in row]
        first = rows[0][1]
        best = min(good, key=lambda row: row["us"])
        held = min((r for r in good if r["held"]), key=lambda row: row["us"], default=None)
        summary = {
            "best of": f"{self.name} {direction}",
            "rule": round(first.get("percent", 0), 1),
            "best": round(best["percent"], 1),
            "best shape": best["shape"],
            "best held": held and round(held["percent"], 1),
            "rule us": first.get("us"),
            "best us": best["us"],
            "failed": sum("failed" in row or "wrong" in row for _, row in rows),
        }
        self.emit(summary)
        return first.get("us"), best["us"]

    def run(self, deadline):
        x, weight, bias = (
            t.float().requires_grad_() for t in (self.t.x, self.t.weight, self.t.bias)
        )
        y = self.eager(x, weight, bias)
        gradients = torch.autograd.grad(y, (x, weight, bias), self.dy.float())
        exact = dict(zip(("dx", "dweight", "dbias"), gradients, strict=True))
        forward = self.sweep("forward", 2, {"y": y.detach()}, deadline)
        del x, y
        torch.cuda.empty_cache()
        self.saved = self.plan.forward(self.t, True)[1]
        backward = self.sweep("backward", 3, exact, deadline)
        times = {}
        for place, name in enumerate(("rule", "best")):
            if None not in (forward[place], backward[place]):
                times[name] = (forward[place], forward[place] + backward[place])
        self.emit(
            {
                "total": self.name,
                **{
                    name: {
                        "F": round(200 * self.bytes / f / 1e3 / copy_gbps(), 1),
                        "F+B": round(500 * self.bytes / b / 1e3 / copy_gbps(), 1),
                    }
                    for name, (f, b) in times.items()
                },
            }
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", default="gn_sweep.jsonl")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    origin = stamp(gpu=True) | {"copy_gbps": round(copy_gbps())}
    with open(options.out, "a") as out:

        def emit(row):
            line = json.dumps(row | origin)
            out.write(line + "\n")
            out.flush()
            if "case" not in row:
                print(line, flush=True)

        for case in CASES:
            if options.cases and not any(part in case[0] for part in options.cases):
                continue
            if time.monotonic() > deadline:
                break
            Sweep(case, emit).run(deadline)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
