"""Means of a few values, and their intervals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit


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
    """The geometric mean of ratios; that of the inverse ratios is its inverse."""
    return float(np.exp(np.mean(np.log(list(ratios)))))
