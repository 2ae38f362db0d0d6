"""The target variance of a norm layer, and the names for it."""

from __future__ import annotations

import math
import numbers
import reprlib
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

ModeName: TypeAlias = Literal["golden", "standard"]
ModeLike: TypeAlias = "ModeName | float | NormMode"


@dataclass(frozen=True, init=False)
class NormMode:
    """A target variance with a name. Every `mode` argument of normplug is converted to one.

    Args:
        mode: `"golden"`, `"standard"`, a finite number above 0, or another `NormMode`.

    Attributes:
        target_variance: the variance that the mode stands for.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> NormMode("golden").target_variance
        0.6180339887498949
        >>> print(NormMode.STANDARD, NormMode(0.5), NormMode(1))
        standard 0.5 standard
    """

    target_variance: float
    GOLDEN: ClassVar[NormMode]
    STANDARD: ClassVar[NormMode]

    def __init__(self, mode: ModeLike) -> None:
        object.__setattr__(self, "target_variance", target_variance(mode))

    @property
    def name(self) -> str:
        """`"golden"`, `"standard"`, or the number."""
        names = (name for name, value in _NAMED.items() if value == self.target_variance)
        return next(names, repr(self.target_variance))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"NormMode({self.argument})"

    @property
    def argument(self) -> str:
        """The mode as it is written in a call: `'golden'`, `'standard'`, or the number."""
        return repr(self.name) if self.name in _NAMED else self.name


_NAMED = {"golden": (math.sqrt(5.0) - 1.0) / 2.0, "standard": 1.0}


def target_variance(mode: ModeLike) -> float:
    """The variance that `mode` stands for.

        golden: 1/phi = (sqrt(5) - 1) / 2 = 0.618...        standard: 1        a number: itself

    Args:
        mode: `"golden"`, `"standard"`, a finite number above 0, or a `NormMode`.

    Returns:
        The target variance, in double precision.

    Raises:
        ValueError: for anything else; the message lists what is accepted.

    Examples:
        >>> target_variance("golden")
        0.6180339887498949
    """
    if isinstance(mode, NormMode):
        return mode.target_variance
    if isinstance(mode, str):
        if mode in _NAMED:
            return _NAMED[mode]
    elif isinstance(mode, float) or (isinstance(mode, numbers.Real) and mode is not True):
        try:
            value = float(mode)
        except OverflowError:  # an integer that no float can hold
            value = math.inf
        if 0.0 < value < math.inf:
            return value
    hint = ""
    with suppress(ValueError):
        if isinstance(mode, str) and 0.0 < float(mode) < math.inf:
            hint = f" Give the number itself, without quotes: {float(mode)}."
    raise ValueError(
        f"normplug: mode must be 'golden' (target variance 1/phi = 0.618...), 'standard' (1), "
        f"a finite number above 0, or a NormMode; got {reprlib.repr(mode)}.{hint}"
    )


NormMode.GOLDEN = NormMode(_NAMED["golden"])
NormMode.STANDARD = NormMode(_NAMED["standard"])
