"""Means, 95% t-intervals, differences from the reference paired by seed, and learning rates."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from normplug.experiment.compare.frame import Group

FAR = 5  # interquartile ranges
RATE = "optimizer.lr"
LEFT_OUT = (RATE, "seed", "study")  # options that the sweep over seeds sets itself


def intervals(wide: pd.DataFrame) -> pd.DataFrame:
    """`n`, `mean` and `t95_half_width`, t(0.975, n - 1) * s / sqrt(n), of each column."""
    n = wide.count()
    half_width = stats.t.ppf(0.975, n - 1) * wide.sem()
    return pd.DataFrame({"n": n, "mean": wide.mean(), "t95_half_width": half_width})


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
    if not values.notna().any(axis=None):
        return values.notna()
    low, high = np.nanquantile(values, [0.25, 0.75])
    reach = FAR * (high - low)
    return ((values < low - reach) | (values > high + reach)) & (reach > 0)


def speed_ratios(group: Group) -> pd.DataFrame:
    """The speed of each arm over its speed reference's, by seed that both ran on one hardware."""
    speed, hardware = group.wide("items_per_s"), group.wide("hardware")
    speed = speed.where(speed > 0)
    references = {arm: group.speed_reference(arm) for arm in group.arms}
    found = {
        arm: (speed[arm] / speed[of]).where(hardware[arm] == hardware[of])
        for arm, of in references.items()
        if of not in (None, arm)
    }
    return pd.DataFrame(found, index=group.seeds).dropna(axis=1, how="all")


def summarise(group: Group) -> pd.DataFrame:
    """A row for each arm: the reference first, then by effect; arms with CUDA graphs come last.

    Scores are as in `result.json`: accuracies are fractions. Speeds, steps and memory are medians
    over runs, and the speed ratio is the geometric mean over pairs.
    """
    paired, ratios, finished = differences(group), speed_ratios(group), group.finished
    statuses = pd.crosstab(group.runs.arm, group.runs.status)
    statuses = statuses.reindex(columns=["finished", "diverged"], fill_value=0)
    speeds = finished[finished.items_per_s > 0].groupby(["arm", "hardware"]).items_per_s
    spread = (speeds.max() / speeds.min()).groupby("arm").max()
    columns = {
        "model": group.model,
        "data": group.data,
        "arm": pd.Series(group.arms, index=group.arms),
        "n_finished": statuses.finished,
        "n_diverged": statuses.diverged,
        "n_far_off": far_off(group.wide("test_score")).sum(),
        "n_expected": len(group.seeds),
        "reference": group.reference,
        "measure": group.measure.name,
        "unit": group.measure.unit,
        "better": group.measure.better,
        "items": group.measure.items,
    }
    table = pd.DataFrame(columns).loc[group.arms]  # the constructor sorts them
    parts = {
        "test": group.wide("test_score"),
        "test_bits": group.wide("test_bits_per_character"),
        "difference_to_reference": paired,
        "validation_difference_to_reference": differences(group, "validation_score"),
    }
    for name, wide in parts.items():
        table = table.join(intervals(wide).add_prefix(f"{name}_"))
        if wide is paired:
            table["difference_to_reference_p_holm"] = adjusted_ps(paired)
    table["speed_reference"] = [group.speed_reference(arm) for arm in group.arms]
    table["speed_reference_spread"] = table.speed_reference.map(spread)
    table["speed_ratio_n"] = ratios.count()
    table["speed_ratio_geometric_mean"] = np.exp(np.log(ratios).mean())
    table["speed_ratio_lowest"], table["speed_ratio_highest"] = ratios.min(), ratios.max()
    medians = finished.groupby("arm")[["items_per_s", "step_ms", "peak_memory_bytes"]].median()
    table["items_per_s_median"], table["step_ms_median"] = medians.items_per_s, medians.step_ms
    table["peak_memory_mib_median"] = medians.peak_memory_bytes / 2**20
    norms = finished.dropna(subset="norms_swapped").groupby("arm").norms_swapped.unique()
    table["norms_swapped"] = [
        " ".join(f"{count:.0f}" for count in sorted(norms.get(arm, ()))) for arm in table.arm
    ]
    counts = [name for name in table if name.endswith("_n")]
    table[counts] = table[counts].fillna(0).astype(int)
    return _by_effect(group, table)


def _by_effect(group: Group, table: pd.DataFrame) -> pd.DataFrame:
    sign = -1 if group.measure.better == "higher" else 1
    effect = table.difference_to_reference_mean if group.reference else table.test_mean
    order = pd.DataFrame(
        {
            # The family of the reference comes first.
            "family": [
                group.uses_graphs(a) != group.uses_graphs(group.reference) for a in table.arm
            ],
            "other": table.arm != table.speed_reference,
            "effect": sign * effect,
            "place": range(len(table)),
        }
    )
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
    return pd.DataFrame([_best_rate(found) for _, found in arms])


def _best_rate(runs: pd.DataFrame) -> dict[str, Any]:
    done, first = runs[runs.status == "finished"], runs.iloc[0]
    measure = next(iter(done.measure), first.measure)
    last = done.pivot_table("validation_score", "learning_rate", "seed", "last")
    last = last.reindex(index=sorted(set(runs.learning_rate)), columns=sorted(set(runs.seed)))
    scores = last.mean(axis=1, skipna=False)
    counted = scores.dropna() * (1 if measure.better == "higher" else -1)
    best = counted.idxmax() if len(counted) else np.nan
    options = [o for o in first.overrides if o.lstrip("+").split("=")[0] not in LEFT_OUT]
    return {
        "title": f"{first.model} on {first.data}: {first.arm}",
        "measure": measure,
        "scores": scores.to_dict(),
        "best": best,
        "options": [*options, f"{RATE}={best}"],
    }
