"""Time training programs with `python -m normplug run` and without it: the table of docs/run.md.

    python benchmarks/run.py --json run.json

Each program is this file in a process of its own, which imports nothing of normplug: YOLOv8 of
ultralytics, if it is installed, a 3d U-Net like nnU-Net's, and a ResNet-50. They train in float16
with a GradScaler, as their users do. The processes with and without take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from nets import NETS, Net, Target, laid_out

WARM_UPS = 10


def _yolo(batch: int, size: int = 640) -> Target:
    """YOLOv8n with its loss, on random images with eight boxes each."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolov8n.yaml", verbose=False)
    model.args = get_cfg()
    count = 8 * batch
    boxes = torch.rand(count, 4) * 0.2 + 0.4
    owners = torch.arange(batch).repeat_interleave(8).float()
    classes = torch.randint(80, (count, 1)).float()
    data = (torch.randn(batch, 3, size, size), owners, classes, boxes)

    def loss(model: Any, data: Any) -> Any:
        names = ("img", "batch_idx", "cls", "bboxes")
        return model(dict(zip(names, data, strict=True)))[0].sum()

    return model, data, loss


def _nnunet3d(batch: int) -> Target:
    """The U-Net of `nets.py` in the contiguous layout, in which nnU-Net trains."""
    model, data, loss = NETS["nnunet3d"].make(batch=batch)
    return *laid_out(model, data, "contiguous"), loss


PROGRAMS = {
    "yolov8n": Net(_yolo, (64,)),
    "nnunet3d": Net(_nnunet3d, (2,)),
    "resnet50": NETS["resnet50"],
}


def train(name: str, device: str, batch: int, steps: int) -> None:
    """The program: train, and print the images a second and the peak of the memory in GiB."""
    torch.manual_seed(0)
    model, data, loss = PROGRAMS[name].make(batch=batch)
    model = model.to(device).train()
    data = tuple(each.to(device) for each in data)
    is_cuda = device == "cuda"
    dtype = torch.float16 if is_cuda else torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=is_cuda)
    start = 0.0
    for step in range(WARM_UPS + steps):
        if step == WARM_UPS:
            start = _now()
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            value = loss(model, data)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    speed = batch * steps / (_now() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    print(json.dumps({"images_per_s": speed, "peak_gib": memory}))


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _outcome(arm: str, words: list[str], device: str) -> dict[str, Any]:
    """What the program prints, in an arm."""
    run = ["-m", "normplug", "run", "--devices", "cuda" if device == "cuda" else "any"]
    command = [sys.executable, *(run if arm == "run" else []), __file__, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(a: Namespace) -> Iterator[Any]:
    """A row for each program and arm: medians over the processes."""
    from normplug._files import stamp
    from normplug.bench.rows import Rows
    from normplug.bench.timing import attempt

    device = a.device.type
    for name in a.rows:
        batch = a.batch or PROGRAMS[name].batches[0]
        words = ["--train", name, "--device", device]
        words += ["--batch", str(batch), "--steps", str(a.steps)]
        found: dict[str, list[Any]] = {"without": [], "run": []}
        for _ in range(a.rounds):
            for arm, outcomes in found.items():
                outcome = attempt(name, partial(_outcome, arm, words, device))
                outcomes += [outcome] if outcome else []
        if not all(found.values()):
            continue
        rows = []
        for arm, outcomes in found.items():
            speeds = [each["images_per_s"] for each in outcomes]
            row = {"model": name, "batch": batch, "arm": arm}
            row["images_per_s"] = median(speeds)
            row["slowest"] = min(speeds)
            row["fastest"] = max(speeds)
            row["peak_gib"] = outcomes[0]["peak_gib"]
            row["over_without"] = median(speeds) / (rows or [row])[0]["images_per_s"]
            rows.append(row | stamp(device == "cuda"))
        yield Rows(
            rows, ("model", "batch", "arm", "images_per_s", "peak_gib", "over_without")
        )


OPTIONS: dict[str, Any] = {
    "--rows": {
        "nargs": "+",
        "choices": PROGRAMS,
        "default": list(PROGRAMS),
        "metavar": "NAME",
    },
    "--batch": {"type": int, "help": "samples a step; default: each program's own"},
    "--steps": {"type": int, "default": 100, "help": "of a process, that are timed"},
    "--rounds": {"type": int, "default": 3, "help": "processes of each arm"},
}


def main(argv: list[str] | None = None) -> None:
    """Measure; or with `--train`, be the program."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--train"]:
        options = dict(zip(words[::2], words[1::2], strict=True))
        sizes = int(options["--batch"]), int(options["--steps"])
        train(options["--train"], options["--device"], *sizes)
    else:
        import script

        script.main(__doc__, measure, OPTIONS, words)


if __name__ == "__main__":
    main()
