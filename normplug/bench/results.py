"""JSON files of results: written after each row, so that an interrupted run loses nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import normplug
from normplug._report.files import write_file
from normplug._report.provenance import versions

Row = dict[str, Any]

PACKAGES = ("torch", "triton", "cuda", "python", "normplug")


class Results:
    """Rows of measurements, and the JSON file they are in.

    Args:
        path: the file; None to write none.
        kind: the kind of the file; it is written into it.
        packages: record the versions of these packages, too.
        resume: keep the rows if `path` exists; otherwise start a new file.
        **facts: other facts about all rows, such as the speed of a copy.

    Attributes:
        path: as given.
        content: what the file holds.

    Raises:
        ValueError: the file to resume cannot be read, is of another kind, or has rows of another
            device, other versions or other facts.
    """

    def __init__(
        self,
        path: Path | None,
        kind: Kind,
        packages: Sequence[str] = (),
        *,
        resume: bool = False,
        **facts: Any,
    ) -> None:
        self.path = path
        facts = {"writer": kind.writer, **provenance(*packages), **facts}
        self.content: dict[str, Any] = {**facts, "rows": []}
        if not resume:
            self._save()
        elif path is not None and path.exists():
            self.content["rows"] = self._rows_alike(path, kind)

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.content["rows"].append(row)
        self._save()

    def update(self, row: Row, keys: Sequence[str]) -> None:
        """Set the fields of the row that has the same `keys`, or add a row; write the file.

        The row gets a date of its own: the other rows of the file may be older.
        """
        rows = self.content["rows"]
        found = next((old for old in rows if all(old[key] == row[key] for key in keys)), None)
        if found is None:
            rows.append(found := {})
        found.update(row, date=_now())
        self._save()

    def _rows_alike(self, path: Path, kind: Kind) -> list[Row]:
        _, found = read(path, (kind,))
        for name, value in self.content.items():
            if name not in ("writer", "date", "rows") and found.get(name) != value:
                raise ValueError(
                    f"{path} has results of another run: its {name} is {found.get(name)}, and now "
                    f"it is {value}. Write to another file."
                )
        return found["rows"]

    def _save(self) -> None:
        if self.path is not None:
            write_file(self.path, json.dumps(self.content, indent=1) + "\n")


class Kind(NamedTuple):
    """A kind of JSON file.

    Attributes:
        what: what the file holds, for error messages.
        writer: the command that writes the file; the file says so, unless it is an older one.
        use: what to do with the file, for error messages.
        keys: the required keys of the JSON object.
        row_keys: the required keys of each row; empty if the file has no rows.
    """

    what: str
    writer: str
    use: str
    keys: frozenset[str]
    row_keys: frozenset[str] = frozenset()

    def fits(self, content: Any) -> bool:
        """Whether `content`, as parsed, is of this kind."""
        if not isinstance(content, Mapping) or not self.keys <= content.keys():
            return False
        if content.get("writer", self.writer) != self.writer:
            return False
        rows = content["rows"] if self.row_keys else []
        return isinstance(rows, list) and all(
            isinstance(row, Mapping) and self.row_keys <= row.keys() for row in rows
        )


STEP = ("model", "batch", "arm")  # the keys that identify a row of training steps
ORIGIN = frozenset({"device", "versions", "date"})
KERNELS = Kind(
    "times of kernels",
    "normplug.bench kernels",
    "`normplug.bench table` and `normplug.bench plot` take it",
    ORIGIN | {"copy_gbps", "rows"},
    frozenset({"op", "direction", "shape", "dtype", "provider"}),
)
MODELS = Kind(
    "times of training steps",
    "normplug.bench models",
    "`normplug.bench table` and `normplug.bench plot` take it",
    ORIGIN | {"settings", "rows"},
    frozenset(STEP),
)
PROFILE = Kind(
    "a profile of training steps",
    "normplug.bench models --profile",
    "`normplug.bench table` takes it",
    ORIGIN | {"settings", "rows"},
    frozenset({*STEP, "groups_ms"}),
)
HOST = Kind(
    "times of single calls",
    "normplug.bench host",
    "`normplug.bench table` and `normplug.bench plot` take it",
    ORIGIN | {"settings", "rows"},
    frozenset({"op", "direction", "layout", "shape", "dtype", "provider", "wall_us"}),
)
SYNC = Kind(
    "times of training steps over several processes",
    "normplug.bench sync",
    "it has no table or plot",
    ORIGIN | {"settings", "rows"},
    frozenset({"batch", "arm", "ms"}),
)
# The first that fits wins: without its writer, a profile also fits `MODELS`, and that fits `SYNC`.
KINDS = (
    KERNELS,
    PROFILE,
    HOST,
    MODELS,
    SYNC,
    Kind(
        "a comparison of architectures",
        "python tests/zoo",
        "its option --markdown writes the table",
        ORIGIN | {"rows"},
        frozenset({"library", "name", "result"}),
    ),
    Kind(
        "a trace",
        "normplug.bench kernels --trace",
        "https://ui.perfetto.dev shows it",
        frozenset({"traceEvents"}),
    ),
    Kind(
        "the result of a run",
        "train.py",
        "`python -m normplug.compare DIRECTORY` takes the directory of its sweep",
        frozenset({"arm", "seed", "status"}),
    ),
)


def spread(unit: str, samples: Sequence[float]) -> Row:
    """The median of some times, and the bounds of their middle 60%, as fields of a row."""
    quintiles = statistics.quantiles(samples, n=5, method="inclusive")
    bounds = {f"{unit}_p20": quintiles[0], f"{unit}_p80": quintiles[-1]}
    return {unit: statistics.median(samples), **bounds}


def median(row: Mapping[str, Any], key: str) -> float | None:
    """The median of a time, if the row has it; rows of older files have it as `key` itself."""
    return row.get(f"median_{key}", row.get(key))


def best(row: Mapping[str, Any], key: str) -> float | None:
    """The best of a time, if the row has it; see `median`."""
    return row.get(key) if f"median_{key}" in row else None


def read(path: Path, kinds: Collection[Kind]) -> tuple[Kind, dict[str, Any]]:
    """The kind and the content of a JSON file of one of `kinds`.

    Raises:
        ValueError: it cannot be read, is not JSON, or is of another kind; the message says which.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not JSON: it is not text in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        fault = f"not JSON: {error}" if text.strip() else "empty"
        raise ValueError(f"{path} is {fault}.") from None
    found = next((kind for kind in KINDS if kind.fits(content)), None)
    if found is not None and found in kinds:
        return found, content
    wanted = " or ".join(f"`{kind.writer}`" for kind in kinds)
    holds, use = "a list" if isinstance(content, list) else "no result of normplug", ""
    if found is not None:
        holds, use = f"{found.what}, as `{found.writer}` writes", f"; {found.use}"
    raise ValueError(f"{path} holds {holds}{use}. This command takes what {wanted} writes.")


def provenance(*packages: str) -> dict[str, Any]:
    """The device, the versions (of `packages`, too) and the date of a measurement."""
    found = versions(*packages)
    found |= {"cuda": str(torch.version.cuda), "normplug": normplug.__version__}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: found[name] for name in (*PACKAGES, *packages) if name in found},
        "date": _now(),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
