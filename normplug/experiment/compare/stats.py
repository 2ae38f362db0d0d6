"""Means, 95% t-intervals, differences from the reference paired by seed, and learning rates."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from normplug.experiment.compare.frame import Group
from normplug.experiment.measure import Measure

RATE = "optimizer.lr"
FAR = 5
LEFT_OUT = (RATE, "seed", "study")  # options that the sweep over seeds sets itself


class Interval(NamedTuple):
    """A mean over `n` values, and half the width of its 95% t-interval (NaN for one value)."""

    n: int
    mean: float
    half_width: float


def t_interval(values: pd.Series[float]) -> Interval:
    """The mean, plus or minus t(0.975, n - 1) * s / sqrt(n); missing values do not count."""
    found = values.dropna()
    n = len(found)
    half_width = stats.t.ppf(0.975, n - 1) * found.sem() if n > 1 else np.nan
    return Interval(n, float(found.mean()), float(half_width))


def differences(group: Group, field: str = "test_score") -> pd.DataFrame:
    """The score of each arm minus the reference's: a row a seed, a column an arm."""
    wide = group.wide(field)
    if group.reference is None:
        return wide.iloc[:, :0]
    return wide.sub(wide[group.reference], axis=0).drop(columns=group.reference)


def adjusted_ps(paired: pd.DataFrame) -> pd.Series[float]:
    """The p-value of a paired t-test for each column of `differences`, adjusted by Holm (1979).

    Columns with fewer than two pairs have none. Calling a difference significant where its value is
    below 0.05 keeps the probability of any false positive at 5% or less.
    """
    ps = pd.Series({arm: _p_value(paired[arm].dropna()) for arm in paired}, dtype=float)
    ps = ps.dropna().sort_values(kind="stable")
    return (ps * np.arange(len(ps), 0, -1)).clip(upper=1).cummax()


def _p_value(found: pd.Series[float]) -> float:
    if len(found) < 2:
        return np.nan
    if not np.ptp(found):  # t is 0 / 0, or infinite
        return float(found.iloc[0] == 0)
    with warnings.catch_warnings():  # of values that differ by rounding only
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(stats.ttest_1samp(found, 0).pvalue)


def far_off(values: pd.DataFrame) -> pd.DataFrame:
    """Which values are more than `FAR` interquartile ranges outside the quartiles of all."""
    known = values.stack()
    if known.empty:
        return values.notna()
    low, high = known.quantile(0.25), known.quantile(0.75)
    reach = FAR * (high - low)
    return ((values < low - reach) | (values > high + reach)) & (reach > 0)


def speed_ratios(group: Group) -> pd.DataFrame:
    """The speed of each arm over its speed reference's, by seed that both ran on one hardware."""
    speed, hardware = group.wide("items_per_s"), group.wide("hardware")
    speed = speed.where(speed > 0)
    found = {}
    for arm in group.arms:
        of = group.speed_reference(arm)
        if of is not None and of != arm:
            found[arm] = (speed[arm] / speed[of]).where(hardware[arm] == hardware[of])
    return pd.DataFrame(found, index=group.seeds).dropna(axis=1, how="all")


def speed_spread(group: Group, arm: str | None) -> float:
    """The fastest run of an arm over its slowest, on one hardware; 1 for a single run."""
    runs = group.finished[(group.finished.arm == arm) & (group.finished.items_per_s > 0)]
    speeds = runs.groupby("hardware").items_per_s
    return float((speeds.max() / speeds.min()).max()) if len(runs) else 1.0


def summarise(group: Group) -> pd.DataFrame:
    """A row for each arm: the reference first, then by effect; arms with CUDA graphs follow theirs.

    Scores are as in `result.json`: accuracies are fractions. Speeds, steps and memory are medians
    over runs, and the speed ratio is the geometric mean over pairs.
    """
    paired, validation = differences(group), differences(group, "validation_score")
    ps, ratios = adjusted_ps(paired), speed_ratios(group)
    scores, bits = group.wide("test_score"), group.wide("test_bits_per_character")
    statuses = group.runs.groupby("arm").status.value_counts().unstack(fill_value=0)
    medians = group.finished.groupby("arm")[["items_per_s", "step_ms", "peak_memory_bytes"]]
    medians = medians.median().reindex(group.arms)
    nothing, far = pd.Series(dtype=float), far_off(scores)
    rows = []
    for arm in group.arms:
        norms = group.finished.norms_swapped[group.finished.arm == arm].dropna()
        ratio = ratios.get(arm, nothing).dropna()
        of = group.speed_reference(arm)
        rows.append(
            {
                "model": group.model,
                "data": group.data,
                "arm": arm,
                "n_finished": statuses.get("finished", {}).get(arm, 0),
                "n_diverged": statuses.get("diverged", {}).get(arm, 0),
                "n_far_off": far[arm].sum(),
                "n_expected": len(group.seeds),
                "reference": group.reference,
                **{"measure": group.measure.name, "unit": group.measure.unit},
                **{"better": group.measure.better, "items": group.measure.items},
                **_named("test", t_interval(scores[arm])),
                **_named("test_bits", t_interval(bits[arm])),
                **_named("difference_to_reference", t_interval(paired.get(arm, nothing))),
                "difference_to_reference_p_holm": ps.get(arm, np.nan),
                **_named(
                    "validation_difference_to_reference", t_interval(validation.get(arm, nothing))
                ),
                "speed_reference": of,
                "speed_reference_spread": speed_spread(group, of),
                "speed_ratio_n": len(ratio),
                "speed_ratio_geometric_mean": stats.gmean(ratio) if len(ratio) else np.nan,
                "speed_ratio_lowest": ratio.min(),
                "speed_ratio_highest": ratio.max(),
                "items_per_s_median": medians.items_per_s[arm],
                "step_ms_median": medians.step_ms[arm],
                "peak_memory_mib_median": medians.peak_memory_bytes[arm] / 2**20,
                "norms_swapped": " ".join(str(int(count)) for count in sorted(set(norms))),
            }
        )
    return _by_effect(group, pd.DataFrame(rows))


def _named(name: str, found: Interval) -> dict[str, Any]:
    n, mean, half_width = found
    return {f"{name}_n": n, f"{name}_mean": mean, f"{name}_t95_half_width": half_width}


def _by_effect(group: Group, table: pd.DataFrame) -> pd.DataFrame:
    sign = -1 if group.measure.better == "higher" else 1
    effect = table.difference_to_reference_mean if group.reference else table.test_mean
    order = pd.DataFrame(
        {
            "family": [group.uses_graphs(arm) for arm in table.arm],
            "other": table.arm != table.speed_reference,
            "effect": sign * effect,
            "place": range(len(table)),
        }
    )
    if group.reference:  # the family of the reference comes first
        order["family"] ^= group.uses_graphs(group.reference)
    return table.loc[order.sort_values([*order]).index].reset_index(drop=True)


def best_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Choose each arm's learning rate from a sweep over rates, by one rule for all arms.

    The best rate has the best mean validation after the last epoch, over all seeds of the arm. A
    rate counts if each of these seeds finished with it. Of equal scores, the smaller rate is taken.

    Args:
        runs: of `find_runs`.

    Returns:
        A row for each arm, in the order of the runs: `title`, `measure`, `scores` (rate -> mean
        score; NaN for a rate that does not count), `best` (NaN if no rate counts), `options` (with
        the best rate, without seed and study).

    Raises:
        ValueError: no run records its learning rate and options.
    """
    known = runs[runs.learning_rate.notna() & (runs.overrides.str.len() > 0)]
    if known.empty:
        raise ValueError(
            "normplug.compare: no run records its learning rate. `result.json` needs the keys "
            "learning_rate and overrides, which train.py writes: repeat the sweep."
        )
    arms = known.groupby(["model", "data", "arm"], sort=False)
    return pd.DataFrame([_best_rate(*name, found) for name, found in arms])


def _best_rate(model: str, data: str, arm: str, runs: pd.DataFrame) -> dict[str, Any]:
    done = runs[runs.status == "finished"]
    measure: Measure = next(iter(done.measure), runs.measure.iloc[0])
    last = done.pivot_table("validation_score", "learning_rate", "seed", "last")
    last = last.reindex(index=sorted(set(runs.learning_rate)), columns=sorted(set(runs.seed)))
    scores = last.mean(axis=1, skipna=False)
    counted = scores.dropna()
    best = counted.idxmax() if measure.better == "higher" else counted.idxmin()
    options = [o for o in runs.overrides.iloc[0] if o.lstrip("+").split("=")[0] not in LEFT_OUT]
    return {
        "title": f"{model} on {data}: {arm}",
        "measure": measure,
        "scores": scores.to_dict(),
        "best": best,
        "options": [*options, f"{RATE}={best}"],
    }
