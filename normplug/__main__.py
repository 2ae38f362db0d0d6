"""`python -m normplug` prints the environment, for bug reports. `run`: see `_run`."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

import normplug
from normplug._checks import DEFAULT_BACKEND
from normplug._ops import can_run
from normplug._run import command
from normplug._table import table
from normplug.native.__main__ import compiled

_PACKAGES = (
    "triton",
    "numpy",
    "lightning",
    "transformers",
    "timm",
    "torchvision",
    "diffusers",
)
# Prefixes of the environment variables that the report shows.
_VARIABLES = (
    "NORMPLUG_",
    "TRITON_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "NCCL_",
    "OMP_NUM_THREADS",
)


def report() -> str:
    """Versions, GPUs, backend, C++ launcher and environment variables, one per line."""
    rows = [
        ("normplug", normplug.__version__),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda}"),
    ]
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            rows.append((package, version(package)))
    gpus = range(torch.cuda.device_count())
    rows += [(f"GPU {i}", str(torch.cuda.get_device_properties(i))) for i in gpus]
    device = torch.empty(0, device="cuda" if gpus else "cpu")
    why = can_run.refusal_now() or can_run.refusal_of_device(device)
    rows.append(("backend", f"{DEFAULT_BACKEND}; kernels: {why or 'they can run'}"))
    try:
        rows.append(("C++ launcher", str(compiled())))
    except (ImportError, OSError, RuntimeError) as error:
        rows.append(("C++ launcher", str(error).partition("\n")[0]))
    rows.append(("status", str(normplug.status())))
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            rows.append((name, value))
    return table(rows)


_USAGE = """\
usage: python -m normplug                  print the environment, for bug reports
       python -m normplug run PROGRAM ...  train with a program; run --help has the options
"""


def main(words: list[str]) -> None:
    """Run a program, or print the environment."""
    if words[:1] == ["run"]:
        command.main(words[1:])
    elif words in (["-h"], ["--help"]):
        print(_USAGE, end="")
    elif words:
        sys.exit(f"{_USAGE}python -m normplug: error: unknown argument {words[0]!r}")
    else:
        print(report())


if __name__ == "__main__":
    main(sys.argv[1:])
