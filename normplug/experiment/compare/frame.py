"""Read runs into a DataFrame, a row a run, and collect them in one file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, TypeAdapter

from normplug._results import write_file
from normplug.experiment.measure import RESULT, VARIANCE, Measure

QUANTITIES = ["target_variance", "input_variance", "output_variance", "affine_variance"]
STEPS_KEPT, DIGITS_KEPT = 8, 3  # of a variance.csv in a collected file
# The folders of an absolute path in a JSON text, where a line may end in \\n.
FOLDERS = re.compile(r"(?:(?<![\w.~])|(?<=\\[nrt]))~?/(?:[\w.+-]+/)*(?=[\w.+-])")


class BlockDrop(BaseModel):
    """The loss of a language model, and its loss without each of its blocks."""

    loss: float
    loss_without: list[float]


class Result(BaseModel):
    """The values that are read from a `result.json`. Null means unknown.

    The keys of `test_score`, `curve` and `items_per_s` depend on the measure.
    """

    run: str = ""
    model: str
    data: str
    arm: str
    seed: int
    status: str
    error: str = ""
    measure: Measure
    learning_rate: float = math.nan
    test_score: float = math.nan
    test_bits_per_character: float = math.nan
    curve: list[float | None] = []
    items_per_s: float = math.nan
    step_ms: float = math.nan
    peak_memory_bytes: float = math.nan
    norms_swapped: float = math.nan
    graph: bool = False
    hardware: str = "unknown"
    commit: str = ""
    date: str = ""
    epochs: int = 0
    text_sha256: str = ""
    versions: dict[str, str] = {}
    overrides: list[str] = []
    block_drop: BlockDrop | None = None
    variances: dict[str, Any] | Path | None = None


NUMBERS = [name for name, field in Result.model_fields.items() if field.annotation is float]


def label(arm: str) -> str:
    """The plain name of an arm: `standard-gamma0_0.786` is "standard gamma0=0.786"."""
    parts = re.split(r"-(?!\d)", arm)
    parts = [re.sub(r"^(gamma0|autocast)_|_(?=(?:true|false|[\d.]+)$)", r"\1=", p) for p in parts]
    return " ".join([*["target"] * arm[:1].isdigit(), *parts])


def find_runs(sources: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for each run of the sources, and file -> reason for each that is not a result.

    The columns are the fields of `Result`, `validation_score` (the last of `curve`) and `record`:
    the content of `result.json`, with the name of its directory (`run`) and the path of its
    `variance.csv` (`variances`). A collected file holds a part of that `variance.csv` instead.

    Raises:
        OSError: a source cannot be read.
        ValueError: a source is not there, or holds no run.
    """
    rows: list[dict[str, Any]] = []
    unusable: dict[str, str] = {}
    for source in sources:
        found: Sequence[Any]
        found = _collected(source) if source.is_file() else sorted(source.rglob(RESULT))
        if not found:
            raise ValueError(
                f"normplug.compare: {source} holds no runs. Give a directory that has the "
                "result.json of a run at any depth, or a file that --collect wrote."
            )
        for number, given in enumerate(found, start=1):
            try:
                record = given if source.is_file() else _read(given, source)
                rows.append(_row(record) | {"record": record})
            except (OSError, TypeError, ValueError) as error:
                name = f"{source.name}, run {number}" if source.is_file() else str(given)
                unusable[name] = " ".join(str(error).split())
    runs = pd.DataFrame(rows, columns=[*Result.model_fields, "validation_score", "record"])
    numbers = [*NUMBERS, "validation_score"]
    runs[numbers] = runs[numbers].astype(float).replace([np.inf, -np.inf], np.nan)
    return runs, unusable


def _collected(path: Path) -> Sequence[dict[str, Any]]:
    try:
        return TypeAdapter(list[dict[str, Any]]).validate_json(path.read_bytes())
    except ValueError:
        return []


def _read(path: Path, source: Path) -> dict[str, Any]:
    """Read a `result.json`."""
    values = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
    values = {"run": path.parent.relative_to(source).as_posix()} | values
    if (variances := path.with_name(VARIANCE)).is_file():
        values["variances"] = variances
    return values


def _row(values: dict[str, Any]) -> dict[str, Any]:
    measure = Measure.of(values)
    keys = {"test_score": measure.test_key, "curve": measure.curve_key}
    keys["items_per_s"] = measure.speed_key
    named = values | {name: values.get(key) for name, key in keys.items()} | {"measure": measure}
    known = {name: value for name, value in named.items() if value is not None}
    row = vars(Result.model_validate(known))
    curve, drop = row["curve"], row["block_drop"]
    return row | {
        "validation_score": curve[-1] if curve else math.nan,
        "block_drop": [loss - drop.loss for loss in drop.loss_without] if drop else [],
    }


def read_variance(variances: Any) -> pd.DataFrame | None:
    """Read a `variance.csv` (a Path), or its part in a collected file (a dict); None if it fails.

    Returns:
        A row for each logged step; columns (quantity, depth); NaN where nothing was logged. Only
        the rows of rank 0 are read; if a step was logged twice, the last row counts.
    """
    try:
        if not isinstance(variances, Path):
            axes = variances["steps"], variances["depths"]
            parts = {name: pd.DataFrame(variances[name], *axes, dtype=float) for name in QUANTITIES}
            return pd.concat(parts, axis=1)
        rows = pd.read_csv(variances)
        rows = rows.dropna(subset=rows.columns[-1])  # a row that was cut short
        rows = rows[rows["rank"].astype(int) == 0].astype({"step": int, "depth": int})
        rows = rows.drop_duplicates(["step", "depth"], keep="last")
        table = rows.pivot(index="step", columns="depth", values=QUANTITIES).astype(float)
        return None if table.empty else table
    except (OSError, KeyError, TypeError, ValueError):
        return None


def collect(runs: pd.DataFrame, path: Path) -> None:
    """Write all runs of `find_runs` to `path`, one per line.

    A line has the content of `result.json` without what is local to a machine, and `STEPS_KEPT`
    steps of `variance.csv`. Of an absolute path, only the last component stays.
    """
    lines = []
    for record in runs.record:
        kept = record.copy()
        kept.pop("process", None)
        found = read_variance(kept.pop("variances", None))
        if found is not None:
            kept.pop("input_variances", None)  # redundant: the last step of `variances`
            kept["variances"] = _thinned(found)
        lines.append(FOLDERS.sub("", json.dumps(kept)))
    content = ",\n".join(lines)
    write_file(path, f"[\n{content}\n]\n")


def _thinned(table: pd.DataFrame) -> dict[str, Any]:
    """`STEPS_KEPT` steps, the first and the last included, with `DIGITS_KEPT` digits."""
    places = np.linspace(0, len(table) - 1, STEPS_KEPT).round().astype(int)
    table = table.iloc[np.unique(places)]
    rounded = table.map(lambda value: float(f"{value:.{DIGITS_KEPT}g}")).astype(object)
    rounded = rounded.where(np.isfinite(table), None)
    parts = {name: rounded[name].to_numpy().tolist() for name in QUANTITIES}
    return {"steps": table.index.tolist(), "depths": table[QUANTITIES[0]].columns.tolist(), **parts}
