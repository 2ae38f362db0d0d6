"""The runs of a study: read, grouped, and computed into what the tables and the plots show."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import pandas as pd
from pydantic import BaseModel, BeforeValidator, TypeAdapter
from scipy import stats

from normplug._files import write_file
from normplug._measure import ACCURACY, REFERENCES, RESULT, VARIANCE, Measure

SCORES = ["test_score", "test_bits_per_character", "validation_score"]
QUANTITIES = ["target_variance", "input_variance", "output_variance", "affine_variance"]
# The folders of an absolute path in a JSON text, where a line may end in \\n.
FOLDERS = re.compile(r"(?:(?<![\w.~])|(?<=\\[nrt]))~?/(?:[\w.+-]+/)*(?=[\w.+-])")
UNKNOWN = (None, math.inf, -math.inf)
Number: TypeAlias = Annotated[
    float, BeforeValidator(lambda x: math.nan if x in UNKNOWN else x)
]


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
    hardware: str = "unknown"
    commit: str = ""
    date: str = ""
    epochs: int = 0
    text_sha256: str = ""
    versions: dict[str, str] = {}
    overrides: list[str] = []
    block_drop: dict[str, Any] = {}
    target_variance: list[Number] = []
    input_variance: list[Number] = []
    output_variance: list[Number] = []
    affine_variance: list[Number] = []


def label(arm: str) -> str:
    """The plain name of an arm: `standard-gamma0_0.786` is "standard gamma0=0.786"."""
    parts = re.split(r"-(?!\d)", arm)
    parts = [
        re.sub(r"^(gamma0|autocast)_|_(?=(?:true|false|[\d.]+)$)", r"\1=", p)
        for p in parts
    ]
    if arm[:1].isdigit():
        parts = ["target", *parts]
    return " ".join(parts)


# The names of models and data in titles of pictures.
PLAIN = {
    "resnet18": "ResNet-18",
    "vit_tiny": "small ViT",
    "gpt_24x256": "GPT with 24 blocks",
    "gpt_tiny": "GPT with 12 blocks",
    "cifar10": "CIFAR-10",
    "cifar10-jpeg": "CIFAR-10 (JPEG)",
    "stdlib.txt": "Python's standard library",
}


def plain_title(model: str, data: str) -> str:
    """A model and its data in plain names: "ResNet-18 on CIFAR-10"."""
    return " on ".join(PLAIN.get(name, name) for name in (model, data))


def find_runs(sources: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for each run of the sources, and file -> reason for each that is not a result.

    The columns are the fields of `Result`, `validation_score` (the last of `curve`) and `record`:
    the content of `result.json`, with the name of its directory (`run`) and the last step in its
    `variance.csv` (`variances`: quantity -> a list for each step kept -> a value for each norm).
    """
    rows: list[dict[str, Any]] = []
    unusable: dict[str, str] = {}
    for source in sources:
        for name, read in _records(source):
            try:
                rows.append(_row(read()))
            except (LookupError, OSError, TypeError, ValueError) as error:
                unusable[name] = " ".join(str(error).split())
    columns = [*Result.model_fields, "validation_score", "record"]
    return pd.DataFrame(rows, columns=columns), unusable


def _records(source: Path) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of each run of a directory or a collected file, and what reads its record."""
    records: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    if source.is_file():
        content: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError):
            content = TypeAdapter(list[dict[str, Any]]).validate_json(source.read_bytes())
        for record in content:
            name = f"{source.name}: {record.get('run')}"
            records.append((name, partial(dict, record)))
    for path in sorted(source.rglob(RESULT)):
        records.append((str(path), partial(_read, path, source)))
    if not records:
        raise ValueError(
            f"normplug.compare: {source} holds no runs. Give a directory that has the "
            "result.json of a run at any depth, or a file that --collect wrote."
        )
    return records


def _read(path: Path, source: Path) -> dict[str, Any]:
    """Read a `result.json`."""
    values = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
    values = {"run": path.parent.relative_to(source).as_posix()} | values
    log = path.with_name(VARIANCE)
    if log.is_file():
        rows = pd.read_csv(log)
        last = rows[rows["step"] == rows["step"].max()]
        values["variances"] = {name: [last[name].tolist()] for name in QUANTITIES}
    return values


def _row(record: dict[str, Any]) -> dict[str, Any]:
    measure = Measure.of(record)
    test_key, curve_key, speed_key = measure.keys
    values = record | {
        "measure": measure,
        "test_score": record.get(test_key),
        "curve": record.get(curve_key, []),
        "items_per_s": record.get(speed_key),
    }
    logged = record.get("variances", {})
    for name in QUANTITIES:
        if name in logged:
            values[name] = logged[name][-1]  # the last step
    row = vars(Result.model_validate(values))
    drop = row["block_drop"]
    if drop:
        row["block_drop"] = [loss - drop["loss"] for loss in drop["loss_without"]]
    row["validation_score"] = row["curve"][-1] if row["curve"] else math.nan
    row["record"] = record
    return row


def collect(runs: pd.DataFrame, path: Path) -> None:
    """Write all runs of `find_runs` to `path`, one per line, without what is local to a machine."""
    kept = [
        {key: value for key, value in run.items() if key != "process"}
        for run in runs.record
    ]
    content = ",\n".join(FOLDERS.sub("", json.dumps(record)) for record in kept)
    write_file(path, f"[\n{content}\n]\n")


def intervals(wide: pd.DataFrame) -> pd.DataFrame:
    """`n`, `mean` and `t95_half_width`, t(0.975, n - 1) * s / sqrt(n), of each column."""
    n = wide.count()
    half_width = stats.t.ppf(0.975, n - 1) * wide.sem()
    return pd.DataFrame({"n": n, "mean": wide.mean(), "t95_half_width": half_width})


def t_test_ps(
    paired: pd.DataFrame, mean: float = 0.0, alternative: str = "two-sided"
) -> pd.Series[float]:
    """The p of a t-test against a mean, for each column of two differences or more."""
    tested = paired.loc[:, paired.count() > 1]
    with warnings.catch_warnings():
        # SciPy warns where differences are equal, as those of equal runs are.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_1samp(tested, mean, nan_policy="omit", alternative=alternative)
    return pd.Series(np.ma.filled(test.pvalue, np.nan), tested.columns, dtype=float)


def adjusted_ps(paired: pd.DataFrame) -> pd.Series[float]:
    """The p of a paired t-test for each column, adjusted by Holm (1979)."""
    # Without any difference, t is 0 / 0.
    ps = t_test_ps(paired).fillna(1.0).sort_values(kind="stable")
    return (ps * np.arange(len(ps), 0, -1)).clip(upper=1).cummax()


def equivalence_ps(paired: pd.DataFrame, margin: float) -> pd.Series[float]:
    """The p of two one-sided t-tests (TOST) for each column: the larger one; not adjusted."""
    above = t_test_ps(paired, -margin, "greater")
    below = t_test_ps(paired, margin, "less")
    return np.maximum(above, below)


def far_off(values: pd.DataFrame) -> pd.DataFrame:
    """Which values are more than 5 interquartile ranges outside the quartiles of all."""
    low, high = pd.Series(values.to_numpy().ravel()).quantile([0.25, 0.75])
    reach = 5 * (high - low)
    return ((values < low - reach) | (values > high + reach)) & (reach > 0)


class Group:
    """The runs of one model on one data set, with the columns of `find_runs`.

    Of each arm and seed, at most one run is finished. The first of `wanted` that has a finished run
    is the reference, and those before it are `lacking`. `margin` is of an equivalence, in the unit
    of differences. With `over_rates`, `runs` are means over the learning rates of `every` run.
    """

    def __init__(
        self,
        every: pd.DataFrame,
        wanted: Sequence[str],
        margin: float | None,
        over_rates: bool,
    ) -> None:
        self.every = every
        self.margin = margin
        self.runs = runs = _mean_over_rates(every) if over_rates else every
        self.model = runs.model.iloc[0]
        self.data = runs.data.iloc[0]
        rates = ", ".join(map("{:g}".format, np.unique(every.learning_rate.dropna())))
        means = f": means over the learning rates {rates}" if over_rates else ""
        self.title = f"{self.model} on {self.data}{means}"
        self.plain_title = f"{plain_title(self.model, self.data)}{means}"
        self.arms = sorted(set(runs.arm))
        self.seeds = sorted(set(runs.seed))  # that each arm should have
        self.finished = runs[runs.status == "finished"]  # no other run is averaged
        self.measure: Measure = next(iter(self.finished.measure), ACCURACY)
        done = {label(arm): arm for arm in self.finished.arm}
        names = [label(arm) for arm in wanted]
        present = [name for name in names if name in done]
        self.reference = done[present[0]] if present else None
        first = names.index(present[0]) if present else len(names)
        self.lacking = " or ".join(names[:first])

    def wide(self, field: str) -> pd.DataFrame:
        """A column of the finished runs as a table: one row per seed, one column per arm."""
        found = self.finished.pivot(index="seed", columns="arm", values=field)
        return found.reindex(index=self.seeds, columns=self.arms)

    def differences(self, field: str = "test_score") -> pd.DataFrame:
        """A column of each arm minus the reference's: one row per seed, one column per arm."""
        wide = self.wide(field)
        if self.reference is None:
            return wide * np.nan
        return wide.sub(wide[self.reference], axis=0).assign(**{self.reference: np.nan})

    def lists(self, field: str) -> dict[str, pd.DataFrame]:
        """Arm -> a column's lists: one row per seed, columns from 1 to the end of the shortest."""
        tables = {}
        for arm in self.table.arm:
            lists = self.finished[self.finished.arm == arm].set_index("seed")[field]
            table = pd.DataFrame([*map(pd.Series, lists)], lists.index, dtype=float)
            table = table.dropna(how="all").dropna(axis=1)
            if table.size:
                tables[arm] = table.set_axis(table.columns + 1, axis=1)
        return tables

    def curves(self) -> dict[str, pd.DataFrame]:
        """`lists` of the validation, where a column is an epoch that was validated."""
        tables = self.lists("curve")
        epochs = self.finished.groupby("arm").epochs.min()
        for arm, table in tables.items():
            table.columns *= max(1, epochs[arm] // table.shape[1])
        return tables

    def gaps(self) -> dict[str, pd.DataFrame]:
        """Arm -> its `curves` minus the reference's, of the seeds and epochs that both have."""
        curves = self.curves()
        of_reference = curves.pop(self.reference or "", pd.DataFrame())
        gaps = {arm: table.sub(of_reference) for arm, table in curves.items()}
        gaps = {arm: gap.dropna(how="all").dropna(axis=1) for arm, gap in gaps.items()}
        return {arm: gap for arm, gap in gaps.items() if gap.size}

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each arm: the reference, then by effect.

        Scores are as in `result.json`: accuracies are fractions. Speeds, steps and memory are
        medians over runs, which ran at different times: no ratio of them is given.
        """
        differences = self.differences()
        validation = self.differences("validation_score")
        ps = {"p_holm": adjusted_ps(differences)}
        if self.margin is not None:
            within = self.margin / self.measure.scale
            ps["p_equivalent"] = equivalence_ps(differences, within)
        parts = [
            intervals(self.wide("test_score")).add_prefix("test_"),
            intervals(self.wide("test_bits_per_character")).add_prefix("test_bits_"),
            intervals(differences).add_prefix("difference_to_reference_"),
            pd.DataFrame(ps).add_prefix("difference_to_reference_"),
            intervals(validation).add_prefix("validation_difference_to_reference_"),
            self._costs(),
        ]
        table = self._counts()
        for part in parts:
            table = table.join(part)
        return self._sorted(table)

    def _counts(self) -> pd.DataFrame:
        """How many runs each arm has, and how they ended."""
        statuses = pd.crosstab(self.runs.arm, self.runs.status)
        columns = {
            "model": self.model,
            "data": self.data,
            "arm": self.arms,
            "n_finished": statuses.get("finished", 0),
            "n_diverged": statuses.get("diverged", 0),
            "n_far_off": far_off(self.wide("test_score")).sum(),
            "n_expected": len(self.seeds),
            "reference": self.reference,
            **vars(self.measure),
        }
        return pd.DataFrame(columns, index=self.arms).rename(columns={"name": "measure"})

    def _costs(self) -> pd.DataFrame:
        """The medians of each arm's speed, time of a step and peak memory."""
        mib = self.finished.peak_memory_bytes / 2**20
        by_arm = self.finished.assign(peak_memory_mib=mib).groupby("arm")
        costs = by_arm[["items_per_s", "step_ms", "peak_memory_mib"]].median()
        costs = costs.add_suffix("_median")
        costs["norms_swapped"] = by_arm.norms_swapped.max().astype("Int64")
        return costs

    def _sorted(self, table: pd.DataFrame) -> pd.DataFrame:
        """The reference first, then by effect, the best arm first."""
        effect = table.difference_to_reference_mean if self.reference else table.test_mean
        if self.measure.better == "higher":
            effect = -effect
        is_other = table.arm != self.reference
        order = pd.DataFrame({"other": is_other, "effect": effect})
        order = order.sort_values(["other", "effect"]).index
        return table.loc[order].reset_index(drop=True)


def group_runs(
    runs: pd.DataFrame, reference: str | None, margin: float | None, over_rates: bool
) -> list[Group]:
    """Group by (model, data). Where an arm has several learning rates, each rate is an arm.

    With `over_rates`, an arm's runs are the means of a seed over its rates. Of the runs of one arm
    and seed, the newest finished one counts, or else the newest; the others are "replaced".
    """
    rates = runs.groupby(["model", "data", "arm"]).learning_rate
    of_rate = (rates.transform("nunique", dropna=False) > 1) & runs.learning_rate.notna()
    with_rate = runs.arm + " lr=" + runs.learning_rate.map("{:g}".format)
    arms = runs.arm.where(~of_rate, with_rate)
    runs = runs.assign(plain_arm=runs.arm, arm=arms, done=runs.status == "finished")
    runs = runs.sort_values(["done", "date"], kind="stable")
    replaced = runs.duplicated(["model", "data", "arm", "seed"], keep="last")
    runs.loc[replaced, ["status", "error"]] = "replaced", "by a finished or newer run"
    wanted = [*dict.fromkeys(filter(None, (reference, *REFERENCES)))]
    by_data = runs.groupby(["model", "data"])
    return [Group(found, wanted, margin, over_rates) for _, found in by_data]


def _mean_over_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """A run for each arm and seed; it is finished if the seed has finished with each rate."""
    runs = runs[runs.status != "replaced"]
    by_seed = runs.groupby(["plain_arm", "seed"])
    lacks = runs.done & (by_seed.done.transform("sum") < runs.learning_rate.nunique())
    means = {score: by_seed[score].transform("mean") for score in SCORES}
    runs = runs.assign(arm=runs.plain_arm, curve=[[] for _ in runs.index], **means)
    runs.loc[lacks, ["status", "error"]] = (
        "unfinished",
        "another learning rate has no finished run",
    )
    # Where a rate has not finished, the first run of the seed has not.
    return runs.drop_duplicates(["plain_arm", "seed"])
