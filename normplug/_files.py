"""Files of results: atomic writes, and a stamp that says where the figures come from."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

__version__ = "0.4.1"  # of normplug
_PACKAGES = ("torchvision", "triton", "lightning", "hydra-core", "numpy")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which takes the place of `path` after the block.

    A reader finds the old file or the new one, never a part of either. The new file is written in
    a private folder next to `path`, so no other user can plant a link there. Missing directories
    are created. If the block raises, `path` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)


def write_file(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically; text becomes UTF-8, without newline translation."""
    with replace_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def stamp(gpu: bool, *packages: str, gpus: int = 1) -> dict[str, str]:
    """Where a result comes from: a flat dictionary, for every row of a results file.

    It has `date` (ISO 8601, UTC), `commit` (the hash of the checkout's HEAD, with "-dirty" if files
    differ from it; "unknown" outside a checkout), `device` (the GPUs or the processor in words),
    and the versions of Python, torch, normplug and installed packages, by their names on PyPI.
    """
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": f"{gpus} x {torch.cuda.get_device_name()}" if gpu else processor(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # Not from the installed metadata, which an editable install keeps from an older version.
        "normplug": __version__,
    }
    for package in (*_PACKAGES, *packages):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def _commit() -> str:
    """The commit of the checkout that holds this package; `NORMPLUG_COMMIT` overrides it."""
    override = os.environ.get("NORMPLUG_COMMIT")
    if override:  # for a copy of the checkout without .git
        return override
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():  # installed: a repository around it is not ours
        return "unknown"
    command = ["git", "-C", str(checkout), "describe"]
    options = ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command + options, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def processor() -> str:
    """The processor in words, with its number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        name = model.partition(": ")[2]
    return f"CPU, {os.cpu_count()} x {name}"
