"""Check one architecture after another; a failure does not stop the run."""

from __future__ import annotations

import copy
import fnmatch
import gc
import importlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normplug._checks import MissingPackage, needs
from normplug._files import stamp
from normplug.bench.rows import add_to_file
from zoo.check import SEED, Architecture, Inputs, check, observe

LIBRARIES = ("torchvision", "timm", "transformers", "diffusers")
# Parameters. 16 GiB must hold five copies of a model and two of its gradients.
LARGE = 150_000_000


def run(
    libraries: Sequence[str],
    *,
    only: str = "*",
    large: bool = False,
    device: torch.device,
    path: Path | None = None,
) -> tuple[list[dict[str, Any]], set[str]]:
    """Check the libraries' architectures.

    Args:
        libraries: some of `LIBRARIES`; those that are not installed are printed and skipped.
        only: a glob on the architecture's name.
        large: include architectures with more than `LARGE` parameters.
        device: any but the CPU computes in float64; on the CPU both sides run the same kernels, so
            float32 is accurate enough. If results differ nevertheless, float64 decides.
        path: a JSON file; each row is appended to it.

    Returns:
        A row for each architecture, and the libraries that are not installed.
    """
    rows: list[dict[str, Any]] = []
    missing: set[str] = set()
    origin = stamp(device.type == "cuda", *LIBRARIES)
    for architecture in _architectures(libraries, missing):
        if not fnmatch.fnmatchcase(architecture.name, only):
            continue
        row = check_one(architecture, large=large, device=device) | origin
        rows.append(row)
        print(_line(row), flush=True)
        if path is not None:
            add_to_file(path, [row])
        gc.collect()
    return rows, missing


def _architectures(libraries: Sequence[str], missing: set[str]) -> Iterator[Architecture]:
    for library in libraries:
        try:
            with needs(f"zoo --library {library}", "zoo"):
                module = importlib.import_module(f"zoo.{library}_models")
        except MissingPackage as error:
            missing.add(library)
            print(error, file=sys.stderr, flush=True)
            continue
        yield from module.architectures()


def check_one(
    architecture: Architecture, *, large: bool, device: torch.device
) -> dict[str, Any]:
    """A row: the architecture, its norms, and its result, one of `table.RESULTS`."""
    start = time.monotonic()
    row: dict[str, Any] = {"library": architecture.library, "name": architecture.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the libraries
        try:
            exact = device.type != "cpu"
            row |= _check(architecture, large=large, device=device, exact=exact)
            if row["result"] == "failed" and not exact:  # by rounding, or by a fault?
                again = _check(architecture, large=large, device=device, exact=True)
                if again["result"] in ("ok", "unsteady"):
                    row |= again | {"reason": f"in float64 {again['reason']}".rstrip()}
        except Exception as error:  # of any kind: go on with the next architecture
            row |= {
                "result": "failed",
                "reason": f"{type(error).__name__}: {error}"[:300],
            }
    return row | {"seconds": round(time.monotonic() - start, 1)}


def _check(
    architecture: Architecture, *, large: bool, device: torch.device, exact: bool
) -> dict[str, Any]:
    torch.manual_seed(SEED)
    if not large and (size := _size(architecture)) > LARGE:
        millions = f"{size / 1e6:.0f} million parameters"
        return {
            "result": "skipped",
            "reason": f"too large for CI: {millions}; --all takes it",
        }
    model = architecture.build()
    inputs = architecture.inputs(model)
    if exact:
        model, inputs = model.to(device, torch.float64), _moved(inputs, device)
        try:
            observe(copy.deepcopy(model), inputs)
        except RuntimeError as error:
            return {
                "result": "skipped",
                "reason": f"stock does not run in float64: {error}"[:300],
            }
    report = check(model, inputs)
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "taken": report.taken,
        "left": report.left,
    }
    if report.failures:
        return row | {"result": "failed", "reason": "; ".join(report.failures)}
    if report.unsteady:
        return row | {"result": "unsteady", "reason": report.unsteady}
    if not report.taken:
        return row | {"result": "none taken", "reason": ""}
    # Bits depend on the kind of CPU, and the CPU's results are kept in the repository.
    bits = {} if device.type == "cpu" else {"digest": report.digest}
    return row | {"result": "ok", "reason": "", "error": report.error} | bits


def _size(architecture: Architecture) -> int:
    """The number of parameters; 0 if the model cannot be built on the meta device."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in architecture.build().parameters())
    except Exception:  # a constructor that reads the values of its tensors
        return 0


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(
            device, torch.float64 if tensor.is_floating_point() else tensor.dtype
        )

    return pytree.tree_map_only(Tensor, move, dict(inputs))


def _line(row: dict[str, Any]) -> str:
    result = f"{row['result']}: {row['reason']}" if row["reason"] else row["result"]
    return f"{row['library']} {row['name']}: {result} ({row['seconds']} s)"
