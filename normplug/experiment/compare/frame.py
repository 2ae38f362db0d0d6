"""Read runs into a DataFrame, a row a run, and collect them in one file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import pandas as pd
from pydantic import BaseModel, BeforeValidator, TypeAdapter

from normplug._results import write_file
from normplug.experiment.measure import RESULT, VARIANCE, Measure

QUANTITIES = ["target_variance", "input_variance", "output_variance", "affine_variance"]
# The folders of an absolute path in a JSON text, where a line may end in \\n.
FOLDERS = re.compile(r"(?:(?<![\w.~])|(?<=\\[nrt]))~?/(?:[\w.+-]+/)*(?=[\w.+-])")


UNKNOWN = (None, math.inf, -math.inf)
Number: TypeAlias = Annotated[float, BeforeValidator(lambda x: math.nan if x in UNKNOWN else x)]


class Result(BaseModel):
    """The values that are read from a `result.json`. A number that is null is unknown."""

    run: str = ""
    model: str
    data: str
    arm: str
    seed: int
    status: str
    error: str = ""
    measure: Measure
    learning_rate: Number = math.nan
    test_score: Number = math.nan
    test_bits_per_character: Number = math.nan
    curve: list[Number] = []
    items_per_s: Number = math.nan
    step_ms: Number = math.nan
    peak_memory_bytes: Number = math.nan
    norms_swapped: Number = math.nan
    graph: bool = False
    hardware: str = "unknown"
    commit: str = ""
    date: str = ""
    epochs: int = 0
    text_sha256: str = ""
    versions: dict[str, str] = {}
    overrides: list[str] = []
    block_drop: dict[str, Any] = {}
    input_variance: list[Number] = []
    output_variance: list[Number] = []
    affine_variance: list[Number] = []


def label(arm: str) -> str:
    """The plain name of an arm: `standard-gamma0_0.786` is "standard gamma0=0.786"."""
    parts = re.split(r"-(?!\d)", arm)
    parts = [re.sub(r"^(gamma0|autocast)_|_(?=(?:true|false|[\d.]+)$)", r"\1=", p) for p in parts]
    return " ".join([*["target"] * arm[:1].isdigit(), *parts])


def find_runs(sources: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for each run of the sources, and file -> reason for each that is not a result.

    The columns are the fields of `Result`, `validation_score` (the last of `curve`) and `record`:
    the content of `result.json`, with the name of its directory (`run`) and the last step in its
    `variance.csv` (`variances`: quantity -> a list for each step kept -> a value for each norm).
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
        for given in found:
            try:
                rows.append(_row(_read(given, source) if isinstance(given, Path) else given))
            except (LookupError, OSError, TypeError, ValueError) as error:
                name = given if isinstance(given, Path) else f"{source.name}: {given.get('run')}"
                unusable[str(name)] = " ".join(str(error).split())
    columns = [*Result.model_fields, "validation_score", "record"]
    return pd.DataFrame(rows, columns=columns), unusable


def _collected(path: Path) -> Sequence[dict[str, Any]]:
    try:
        return TypeAdapter(list[dict[str, Any]]).validate_json(path.read_bytes())
    except ValueError:
        return []


def _read(path: Path, source: Path) -> dict[str, Any]:
    """Read a `result.json`."""
    values = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
    values = {"run": path.parent.relative_to(source).as_posix()} | values
    if (log := path.with_name(VARIANCE)).is_file():
        rows = pd.read_csv(log)
        last = rows[rows["step"] == rows["step"].max()]
        values["variances"] = {name: [last[name].tolist()] for name in QUANTITIES}
    return values


def _row(record: dict[str, Any]) -> dict[str, Any]:
    measure = Measure.of(record)
    names = dict(zip(measure.keys, ("test_score", "curve", "items_per_s"), strict=True))
    named = {names.get(key, key): value for key, value in record.items()}
    logged = record.get("variances", {})
    named |= {name: logged[name][-1] for name in QUANTITIES if name in logged}
    row = vars(Result.model_validate(named | {"measure": measure}))
    last = row["curve"][-1] if row["curve"] else math.nan
    if drop := row["block_drop"]:
        row["block_drop"] = [loss - drop["loss"] for loss in drop["loss_without"]]
    return row | {"validation_score": last, "record": record}


def collect(runs: pd.DataFrame, path: Path) -> None:
    """Write all runs of `find_runs` to `path`, one per line, without what is local to a machine."""
    kept = [{key: value for key, value in run.items() if key != "process"} for run in runs.record]
    content = ",\n".join(FOLDERS.sub("", json.dumps(record)) for record in kept)
    write_file(path, f"[\n{content}\n]\n")
