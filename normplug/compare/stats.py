"""Means, 95% t-intervals, and differences from the reference, paired by seed, with p-values."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from normplug._report.intervals import Interval, geometric_mean, holm, p_value, t_interval
from normplug._report.measure import Measure
from normplug.compare.gather import Group, Run

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One line of the summary. None means that there is nothing to average.

    Attributes:
        model: name of the network.
        data: name of the data set.
        arm: baseline, standard, golden, ...
        measure: what the runs are evaluated by; an accuracy is a fraction.
        n_finished: finished runs, the only ones averaged.
        n_expected: seeds that any arm of the group has.
        reference: the arm that this one is compared with; None if there is none.
        why_reference: why it is that arm.
        test_score: the measure on the test set, over the finished runs that have it.
        test_bits: the test loss of a text in bits per character.
        difference: test score minus the reference's, over the seeds that both finished.
        p: p-value of a paired t-test of that difference, adjusted by Holm's method for all arms
            that the group compares with its reference.
        validation_difference: as `difference`, but of the validation after the last epoch.
        speed_ratio: geometric mean of the speed over the reference's, by pairs on one hardware.
        speed_pairs: number of those pairs.
        items_per_s: median over runs.
        step_ms: median over runs of each run's median step.
        peak_memory_mib: median over runs.
        norms_swapped: every count that occurs.
    """

    model: str
    data: str
    arm: str
    measure: Measure
    n_finished: int
    n_expected: int
    reference: str | None
    why_reference: str
    test_score: Interval | None
    test_bits: Interval | None
    difference: Interval | None
    p: float | None
    validation_difference: Interval | None
    speed_ratio: float | None
    speed_pairs: int
    items_per_s: float | None
    step_ms: float | None
    peak_memory_mib: float | None
    norms_swapped: list[int]


def scores(group: Group, arm: str) -> dict[int, float]:
    """Return the test score by seed, of the finished runs that have one."""
    return _values(group.finished(arm), "test_score")


def paired_differences(group: Group, arm: str, field: str = "test_score") -> dict[int, float]:
    """Return the score of `arm` minus the reference's, by seed that both finished.

    `field` is the score's name in `Run`.
    """
    if group.reference in (None, arm):
        return {}
    reference = _values(group.finished(group.reference), field)
    found = _values(group.finished(arm), field)
    return {seed: found[seed] - reference[seed] for seed in found.keys() & reference.keys()}


def speed_ratios(group: Group, arm: str) -> dict[int, float]:
    """Return the speed of `arm` over the reference's, by seed that both ran on one hardware."""
    if group.reference in (None, arm):
        return {}
    runs, references = group.finished(arm), group.finished(group.reference)
    found, reference = _values(runs, "items_per_s"), _values(references, "items_per_s")
    return {
        seed: found[seed] / reference[seed]
        for seed in found.keys() & reference.keys()
        if runs[seed].hardware == references[seed].hardware
        and min(found[seed], reference[seed]) > 0
    }


def adjusted_ps(group: Group) -> dict[str, float]:
    """Return the Holm-adjusted p-value of each arm with two or more pairs with the reference."""
    ps = {arm: p_value(paired_differences(group, arm).values()) for arm in group.arms}
    return holm({arm: p for arm, p in ps.items() if p is not None})


def p_text(p: float) -> str:
    """Format a p-value with three decimals, but never as 0."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def summarise(group: Group) -> list[Row]:
    """One row per arm, in the order of the table."""
    ps = adjusted_ps(group)
    return [_row(group, arm, ps.get(arm)) for arm in group.arms]


def _row(group: Group, arm: str, p: float | None) -> Row:
    runs = group.finished(arm)
    ratios = list(speed_ratios(group, arm).values())
    peak = _median(runs, "peak_memory_bytes")
    norms = {run.norms_swapped for run in runs.values() if run.norms_swapped is not None}
    return Row(
        model=group.model,
        data=group.data,
        arm=arm,
        measure=group.measure,
        n_finished=len(runs),
        n_expected=len(group.seeds),
        reference=group.reference,
        why_reference=group.why_reference,
        test_score=t_interval(scores(group, arm).values()),
        test_bits=t_interval(_values(runs, "test_bits").values()),
        difference=t_interval(paired_differences(group, arm).values()),
        p=p,
        validation_difference=t_interval(
            paired_differences(group, arm, "validation_score").values()
        ),
        speed_ratio=geometric_mean(ratios) if ratios else None,
        speed_pairs=len(ratios),
        items_per_s=_median(runs, "items_per_s"),
        step_ms=_median(runs, "step_ms"),
        peak_memory_mib=None if peak is None else peak / MIB,
        norms_swapped=sorted(norms),
    )


def _values(runs: Mapping[int, Run], field: str) -> dict[int, float]:
    found = {seed: getattr(run, field) for seed, run in runs.items()}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _median(runs: Mapping[int, Run], field: str) -> float | None:
    values = list(_values(runs, field).values())
    return float(np.median(values)) if values else None
