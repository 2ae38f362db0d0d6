"""Means of a few values, their t-intervals, and p-values of their differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit


@dataclass(frozen=True)
class Interval:
    """A mean over `n` values, and half the width of its 95% t-interval (None for one value)."""

    n: int
    mean: float
    half_width: float | None


def t_interval(values: Collection[float]) -> Interval | None:
    """The mean of `values`, plus or minus t(0.975, n - 1) * s / sqrt(n); None without values."""
    sample = np.array(list(values), dtype=float)
    n = sample.size
    if n == 0:
        return None
    if n == 1:
        return Interval(1, float(sample[0]), None)
    half_width = stdtrit(n - 1, 0.975) * sample.std(ddof=1) / np.sqrt(n)
    return Interval(n, float(sample.mean()), float(half_width))


def geometric_mean(ratios: Collection[float]) -> float:
    """The geometric mean of ratios; inverting every ratio inverts it."""
    return float(np.exp(np.mean(np.log(list(ratios)))))


def p_value(differences: Collection[float]) -> float | None:
    """The two-sided p-value of a t-test that the mean is 0; None for fewer than two values.

    It is below 0.05 exactly where the interval of `t_interval` excludes 0.
    """
    interval = t_interval(differences)
    if interval is None or interval.half_width is None:
        return None
    if not interval.half_width:  # all differences are equal
        return float(interval.mean == 0)
    n = interval.n
    t = interval.mean / interval.half_width * stdtrit(n - 1, 0.975)
    return float(2 * stdtr(n - 1, -abs(t)))


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """Adjust the p-values of several comparisons by Holm's step-down method (1979).

    Calling a difference significant where its adjusted p-value is below 0.05 keeps the probability
    of any false positive among all comparisons at 5% or less.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(ps, key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[name]))
        adjusted[name] = largest
    return adjusted
