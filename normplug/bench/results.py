"""What was measured, on what: kept on disk row by row, so that a run cut off loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import normplug
from normplug.bench import rivals
from normplug.experiment.provenance import versions

Row = dict[str, Any]

PACKAGES = ("torch", "triton", "cuda", "python", "normplug", *rivals.PACKAGES.values())


class Results:
    """The contents of the JSON file.

    Args:
        path: where to keep them; None for nowhere.
        packages: whose versions to write down, too.
        **facts: what else holds for all rows, such as the copy speed they are measured against.

    Attributes:
        content: as in the file.
    """

    def __init__(self, path: Path | None, packages: Sequence[str] = (), **facts: Any) -> None:
        self._path = path
        self.content: dict[str, Any] = {**provenance(*packages), **facts, "rows": []}
        self._save()

    def add(self, row: Row) -> None:
        """One more row, in the file at once."""
        self.content["rows"].append(row)
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            write_at_once(self._path, json.dumps(self.content, indent=1) + "\n")


def provenance(*packages: str) -> dict[str, Any]:
    """Device, versions, those of `packages` too, and date."""
    found = versions(*rivals.PACKAGES.values())
    found |= {"cuda": str(torch.version.cuda), "normplug": normplug.__version__}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: found[name] for name in (*PACKAGES, *packages) if name in found},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_at_once(path: Path, text: str) -> None:
    """Write a file such that a reader finds the old text or the new, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_name(f".{path.name}.{os.getpid()}")
    half_written.write_text(text, encoding="utf-8")
    os.replace(half_written, path)
