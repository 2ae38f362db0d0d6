"""Read runs into a DataFrame, a row a run, and group those that can be compared."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, ValidationError

from normplug._results import write_file
from normplug.experiment.measure import (
    ACCURACY,
    ARM_ORDER,
    REFERENCES,
    REFUSAL,
    RESULT,
    VARIANCE,
    Measure,
)

LONGEST = 300  # characters of a name
QUANTITIES = ["target_variance", "input_variance", "output_variance", "affine_variance"]
STEPS_KEPT, DIGITS_KEPT = 8, 3  # of a variance.csv in a collected file
FOLDERS = re.compile(r"(?<![\w.~])~?/(?:[\w.+-]+/)*(?=[\w.+-])")  # in an absolute path
REQUIRED = (  # in the result of a finished run, besides the keys of its measure
    *("model", "data", "arm", "seed", "status", "step_ms", "loader_wait_ms", "peak_memory_bytes"),
    *("norms_swapped", "versions", "hardware", "date"),
)
Name = Annotated[str, Field(max_length=LONGEST)]


class _MeasureKeys(BaseModel, strict=True):
    name: Name
    unit: Name
    better: Literal["higher", "lower"]
    items: Name


class _Measured(BaseModel, strict=True):
    measure: _MeasureKeys


class _BlockDrop(BaseModel, strict=True):
    loss: float
    loss_without: list[float]


class _Result(BaseModel, strict=True):
    """What is read of `result.json`: names are limited, and null means unknown."""

    model: Name
    data: Name
    arm: Name
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    status: Name
    error: str | None = None
    learning_rate: float | None = None
    test_score: float | None = None
    test_bits_per_character: float | None = None
    items_per_s: float | None = None
    step_ms: float | None = None
    loader_wait_ms: float | None = None
    peak_memory_bytes: float | None = None
    norms_swapped: float | None = None
    graph: bool | None = None
    hardware: Name | None = None
    commit: Name | None = None
    date: Name | None = None
    epochs: int | None = None
    curve: list[float | None] | None = None
    text_sha256: Name | None = None
    versions: dict[Name, Name] | None = None
    overrides: list[str] | None = None
    block_drop: _BlockDrop | None = None
    variances: dict[str, Any] | Path | None = None
    run: Name


NUMBERS = [name for name, field in _Result.model_fields.items() if field.annotation == float | None]


def keys(measure: Measure) -> tuple[str, ...]:
    """The keys that `result.json` of a finished run with this measure must hold."""
    return (*REQUIRED, measure.test_key, measure.curve_key, measure.speed_key)


def label(arm: str) -> str:
    """The plain name of an arm: `standard-gamma0_0.786` is "standard gamma0=0.786"."""
    parts = re.split(r"-(?!\d)", arm)
    parts = [re.sub(r"^(gamma0|autocast)_|_(?=(?:true|false|[\d.]+)$)", r"\1=", p) for p in parts]
    return " ".join([*["target"] * arm[:1].isdigit(), *parts])


def find_records(sources: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """File -> content of each `result.json`, and file -> reason for each that cannot be read.

    The content also has `run`, the name of its directory, and `variances`, the path of its
    `variance.csv`; in a file that `collect` wrote, it has a part of that file's content.

    Raises:
        OSError: a source does not exist, or a collected file cannot be read.
        ValueError: a directory holds no `result.json`; a file holds no list of runs.
    """
    records: dict[str, dict[str, Any]] = {}
    unreadable: dict[str, str] = {}
    for source in sources:
        if source.is_file():
            records |= _collected(source)
            continue
        if not source.is_dir():
            raise FileNotFoundError(
                f"normplug.compare: {source} is neither a directory nor a file. Give the directory "
                "that holds the runs of a sweep, or a file that --collect wrote."
            )
        paths = sorted(source.rglob(RESULT))
        if not paths:
            raise ValueError(
                f"normplug.compare: no result.json at any depth under {source}. train.py writes "
                "one into the directory of each run: give that directory, or one above it."
            )
        for path in paths:
            file = str(path) if len(sources) > 1 else path.relative_to(source).as_posix()
            try:
                run = {"run": path.parent.relative_to(source).as_posix()}
                records[file] = run | _read_result(path)
            except (OSError, ValueError) as error:
                unreadable[file] = str(error)
    return records, unreadable


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _read_result(path: Path) -> dict[str, Any]:
    """Read a `result.json`; a run that the latest sweep refused to use counts as failed."""
    values = _read_json(path)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    if (variances := path.with_name(VARIANCE)).is_file():
        values["variances"] = variances
    if (refusal := path.with_name(REFUSAL)).is_file():
        values |= {"status": "failed", "error": refusal.read_text(encoding="utf-8")}
    return values


def _collected(path: Path) -> dict[str, dict[str, Any]]:
    try:
        runs = _read_json(path)
    except ValueError as error:
        raise ValueError(f"normplug.compare: {path} cannot be used: {error}.") from None
    if not (isinstance(runs, list) and runs and all(isinstance(run, dict) for run in runs)):
        raise ValueError(
            f"normplug.compare: {path} does not hold a list of runs. Give a file that "
            "`python -m normplug.compare RUNS --collect FILE` wrote, or a directory of runs."
        )
    return {
        f"{path.name}, run {number}": {"run": f"run {number}"} | run
        for number, run in enumerate(runs, start=1)
    }


def find_runs(sources: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for each run of the sources, and file -> reason for each that cannot be used.

    Raises:
        OSError, ValueError: see `find_records`.
    """
    records, unreadable = find_records(sources)
    rows = []
    for file, values in records.items():
        try:
            rows.append(_row(values))
        except ValueError as error:
            unreadable[file] = str(error)
    columns = [*_Result.model_fields, "measure", "validation_score"]
    runs = pd.DataFrame(rows, columns=columns)
    numbers = [*NUMBERS, "validation_score"]
    runs[numbers] = runs[numbers].astype(float).replace([np.inf, -np.inf], np.nan)
    return runs.assign(hardware=runs.hardware.fillna("unknown")), unreadable


def refuse_unreadable(unreadable: Mapping[str, str]) -> None:
    """Raise ValueError for the first unreadable file, if there is one."""
    for name, why in unreadable.items():
        raise ValueError(
            f"normplug.compare: {name} cannot be used: {why}. Delete it, or repeat the run."
        )


def _row(values: dict[str, Any]) -> dict[str, Any]:
    """The row of a run; a "finished" one that lacks keys is a failed run."""
    given = _valid(_Measured, {"measure": values.get("measure") or vars(ACCURACY)}).measure
    measure = Measure(**vars(given))
    names = {"test_score": measure.test_key, "curve": measure.curve_key}
    names["items_per_s"] = measure.speed_key
    row = vars(_valid(_Result, values | {name: values.get(names[name]) for name in names}, names))
    lacking = [key for key in keys(measure) if key not in values]
    if lacking and row["status"] == "finished":
        row |= {"status": "failed", "error": f"result.json lacks {', '.join(lacking)}"}
    curve, drop = np.array(row["curve"] or (), dtype=float), row["block_drop"]
    return row | {
        **{name: row[name] or "" for name in ("error", "commit", "date", "text_sha256")},
        "measure": measure,
        "curve": curve,
        "validation_score": curve[-1] if curve.size else None,
        "epochs": row["epochs"] or len(curve),
        "block_drop": tuple(loss - drop.loss for loss in drop.loss_without) if drop else (),
        "overrides": row["overrides"] or [],
        "versions": row["versions"] or {},
    }


def _valid(model: type[BaseModel], values: Any, names: Mapping[str, str] | None = None) -> Any:
    """Check values; the error names the key (`names`: field -> key), the rule and the value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str((names or {}).get(str(part), part)) for part in first["loc"][:2]]
        got = "nothing" if first["type"] == "missing" else reprlib.repr(first["input"])
        raise ValueError(f'"{".".join(place)[:LONGEST]}": {first["msg"]}; got {got}') from None
    except OverflowError:
        raise ValueError("a number is too large") from None


@dataclass(frozen=True)
class Group:
    """The runs of one model on one data set.

    Attributes:
        runs: the run used for each arm and seed, with the columns of `find_runs`.
        left_out: runs replaced by a finished or newer run of the same arm and seed.
        references: the arms to compare with, by preference.
    """

    model: str
    data: str
    runs: pd.DataFrame
    left_out: pd.DataFrame
    references: tuple[str, ...]

    @property
    def title(self) -> str:
        """The group's name in headings."""
        return f"{self.model} on {self.data}"

    @cached_property
    def arms(self) -> list[str]:
        """All arms: `ARM_ORDER` first, then by name."""
        order = {arm: place for place, arm in enumerate(ARM_ORDER)}
        return sorted(set(self.runs.arm), key=lambda arm: (order.get(arm, len(order)), arm))

    @cached_property
    def seeds(self) -> list[int]:
        """Every seed that any arm has, and so every seed that each arm should have."""
        return sorted(set(self.runs.seed))

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The finished runs; no other run is averaged."""
        return self.runs[self.runs.status == "finished"]

    @cached_property
    def measure(self) -> Measure:
        """What the runs are judged by; only a finished run is sure to record it."""
        return next(iter(self.finished.measure), ACCURACY)

    @cached_property
    def reference(self) -> str | None:
        """The arm that the others are compared with; None if no such arm has a finished run."""
        finished = set(self.finished.arm)
        return next((arm for arm in self.references if arm in finished), None)

    @property
    def about_reference(self) -> str:
        """Which arm is the reference, and why, in words."""
        start, passed_over = "No reference", self.references
        if self.reference is not None:
            start = f"Reference: {label(self.reference)}"
            passed_over = passed_over[: passed_over.index(self.reference)]
        elif any(arm.startswith(f"{name} lr=") for name in self.references for arm in self.arms):
            return f"{start}: each rate is an arm of its own; --best chooses each arm's rate"
        states = {True: "has no finished run", False: "has no run"}
        whys = [f"{label(arm)} {states[arm in self.arms]}" for arm in passed_over]
        return f"{start}, since {' and '.join(whys)}" if whys else start

    def uses_graphs(self, arm: str | None) -> bool:
        """Whether the finished runs of an arm replayed CUDA graphs."""
        return any(self.finished.graph[self.finished.arm == arm])

    def speed_reference(self, arm: str) -> str | None:
        """The arm to compare the speed of `arm` with: graphs with graphs, if possible.

        Of the reference and its variants (`<reference>-...`), it is the one with the shortest name
        that uses CUDA graphs if `arm` does; the reference itself if there is none.
        """
        if self.reference is None:
            return None
        graph = self.uses_graphs(arm)
        same = [name for name in set(self.finished.arm) if self.uses_graphs(name) == graph]
        family = [name for name in same if f"{name}-".startswith(f"{self.reference}-")]
        return min(family, key=len, default=self.reference)

    @cached_property
    def variances(self) -> tuple[dict[str, Variance], list[str]]:
        """The mean variances of each arm that has any, and notes on what is missing."""
        found: dict[str, list[Variance]] = {}
        notes, absent = [], []
        for run in self.finished.sort_values("seed").itertuples():
            if run.variances is None:
                absent.append(f"{label(run.arm)} seed {run.seed}")
                continue
            try:
                found.setdefault(run.arm, []).append(read_variance(run.variances))
            except (OSError, KeyError, TypeError, ValueError) as error:
                why = " ".join(str(error).split())[:LONGEST]
                notes.append(
                    f"{label(run.arm)}, seed {run.seed}: variance.csv cannot be read: {why}"
                )
        means = {arm: mean_variance(found[arm]) for arm in self.arms if found.get(arm)}
        shared = {arm: mean for arm, mean in means.items() if not mean.table.empty}
        apart = [arm for arm in means if arm not in shared]
        notes += [f"{label(arm)}: its seeds logged no step in common" for arm in apart]
        if not shared:
            notes.append("no variance plots: no finished run has a variance.csv")
        elif absent:
            notes.append(f"no variance.csv, so not in those plots: {', '.join(absent)}")
        return shared, notes

    def wide(self, field: str) -> pd.DataFrame:
        """A column of the finished runs as a table: a row a seed, a column an arm."""
        found = self.finished.pivot(index="seed", columns="arm", values=field)
        return found.reindex(index=self.seeds, columns=self.arms)


def group_runs(runs: pd.DataFrame, reference: str | None = None) -> list[Group]:
    """Group by (model, data). Where an arm has several learning rates, each rate is an arm.

    `reference` is the arm to compare with, where it has finished runs.
    """
    rates = runs.groupby(["model", "data", "arm"]).learning_rate
    of_rate = (rates.transform("nunique", dropna=False) > 1) & runs.learning_rate.notna()
    with_rate = runs.arm + " lr=" + runs.learning_rate.map("{:g}".format)
    # Of the runs of one arm and seed, a finished one stays, and of these the newest.
    runs = runs.assign(arm=runs.arm.where(~of_rate, with_rate), done=runs.status == "finished")
    runs = runs.sort_values(["done", "date"], kind="stable")
    groups = []
    for (model, data), found in runs.groupby(["model", "data"]):
        replaced = found.duplicated(["arm", "seed"], keep="last")
        named = [arm for arm in found.arm.unique() if label(arm) == label(reference or "")]
        wanted = (*named, reference)[:1] if reference else ()
        groups.append(Group(model, data, found[~replaced], found[replaced], wanted + REFERENCES))
    return groups


class Variance(NamedTuple):
    """The variances of one run, or their mean over the runs of one arm."""

    table: pd.DataFrame  # a row a logged step; columns (quantity, depth); NaN: nothing was logged
    kinds: Mapping[str, int]  # how many norms of each class
    runs: int = 1


def read_variance(variances: Path | Mapping[str, Any]) -> Variance:
    """Read a `variance.csv` (rank 0; of a step logged twice, the last), or a collected one.

    Raises:
        OSError, KeyError, TypeError, ValueError: it cannot be read.
    """
    if not isinstance(variances, Path):
        axes = variances["steps"], variances["depths"]
        parts = {name: pd.DataFrame(variances[name], *axes, dtype=float) for name in QUANTITIES}
        return Variance(pd.concat(parts, axis=1), dict(variances["kinds"]))
    rows = pd.read_csv(variances)
    if lacking := {"step", "depth", "kind", *QUANTITIES} - set(rows):
        raise ValueError(f"it lacks the columns {', '.join(sorted(lacking))}")
    rows = rows.dropna(subset=rows.columns[-1])  # a row that was cut short
    if "rank" in rows:
        rows = rows[rows["rank"].isin([0]) | rows["rank"].isna()]
    if rows.empty:
        raise ValueError("it holds no row")
    rows = rows.astype({"step": int, "depth": int} | dict.fromkeys(QUANTITIES, float))
    rows = rows.drop_duplicates(["step", "depth"], keep="last")
    kinds = rows.drop_duplicates("depth").sort_values("depth").kind.value_counts(sort=False)
    table = rows.pivot(index="step", columns="depth", values=QUANTITIES)
    return Variance(table, kinds.to_dict())


def mean_variance(runs: Sequence[Variance]) -> Variance:
    """The mean over runs at the steps that all of them logged.

    A NaN in one run stays NaN in the mean: no cell is averaged over fewer runs.
    """
    tables = [run.table for run in runs]
    steps = reduce(pd.Index.intersection, [table.index for table in tables])
    columns = reduce(pd.Index.intersection, [table.columns for table in tables])
    total = sum(table.loc[steps, columns] for table in tables)
    return Variance(total / len(runs), runs[0].kinds, len(runs))


def collect(sources: Sequence[Path], path: Path) -> int:
    """Write all runs to `path`, one per line, and return how many there are.

    Each is the content of its `result.json` without what is local to a machine: of absolute paths,
    only the last component stays. Of its `variance.csv` it has `STEPS_KEPT` steps.

    Raises:
        OSError: a source cannot be read, or `path` cannot be written.
        ValueError: a `result.json` cannot be read.
    """
    records, unreadable = find_records(sources)
    refuse_unreadable(unreadable)
    lines = ",\n".join(json.dumps(_kept(values)) for values in records.values())
    write_file(path, f"[\n{lines}\n]\n")
    return len(records)


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    kept = {name: _without_folders(value) for name, value in values.items() if name != "process"}
    variances = kept.pop("variances", None)
    if isinstance(variances, Path):
        try:
            variances = _thinned(read_variance(variances))
        except (OSError, ValueError):
            return kept
    if variances:
        kept.pop("input_variances", None)  # redundant: the last step of `variances`
        kept["variances"] = variances
    return kept


def _without_folders(value: Any) -> Any:
    """Reduce each absolute path in a text or a list of texts to its last component."""
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def _thinned(found: Variance) -> dict[str, Any]:
    """`STEPS_KEPT` steps, the first and the last included, with `DIGITS_KEPT` digits."""
    places = np.linspace(0, len(found.table) - 1, STEPS_KEPT).round().astype(int)
    table = found.table.iloc[np.unique(places)]
    rounded = table.map(lambda value: float(f"{value:.{DIGITS_KEPT}g}")).astype(object)
    rounded = rounded.where(np.isfinite(table), None)
    parts = {name: rounded[name].to_numpy().tolist() for name in QUANTITIES}
    depths = table["target_variance"].columns.tolist()
    return {"steps": table.index.tolist(), "depths": depths, "kinds": dict(found.kinds), **parts}
