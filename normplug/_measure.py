"""What a run is judged by, and the names that runs and their comparison share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Files in the directory of a run.
RESULT = "result.json"
METRICS = "metrics.csv"
VARIANCE = "variance.csv"

BASELINE = "baseline"  # the arm whose model is not swapped
REFERENCES = ("standard", BASELINE)  # both compute stock norms


@dataclass(frozen=True)
class Measure:
    """The metric that judges a run; `result.json` stores these four fields under "measure"."""

    name: str
    unit: str  # for display; values in "%" are stored as fractions
    better: str  # "higher" or "lower"
    items: str  # what the speed counts

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Measure:
        """The measure of a `result.json`; a file without one measures accuracy."""
        return cls(**result["measure"]) if result.get("measure") else ACCURACY

    @property
    def keys(self) -> tuple[str, str, str]:
        """The keys in `result.json` of the test, of the validation by epoch, and of the speed."""
        return f"test_{self.name}", f"{self.name}_by_epoch", f"{self.items}_per_s"

    @property
    def scale(self) -> float:
        """The factor from a stored value to a displayed one."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def difference_unit(self) -> str:
        """The unit of a difference between two values: "points" for percentages."""
        return "points" if self.unit == "%" else self.unit

    def number(self, value: float, sign: str = "") -> str:
        """Format a value or a difference without its unit; `sign="+"` always shows the sign."""
        digits = 2 if self.unit == "%" else 4
        rounded = round(self.scale * value, digits) + 0.0  # which turns -0.0 into 0.0
        return f"{rounded:{sign}.{digits}f}"

    def text(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{self.number(value)} {self.unit}"


ACCURACY = Measure("accuracy", "%", "higher", "images")
