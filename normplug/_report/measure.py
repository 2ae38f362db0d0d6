"""What a run is judged by, and what its speed counts: the one home of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measure:
    """What a run is judged by; `result.json` keeps these four under "measure".

    Attributes:
        name: `result.json` has its values as `test_<name>` and `<name>_by_epoch`.
        unit: of the values that are shown; those shown in "%" are kept as fractions.
        better: "higher" or "lower".
        items: what the speed counts; `result.json` has it as `<items>_per_s`.
    """

    name: str
    unit: str
    better: str
    items: str

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Measure:
        """The measure of a `result.json`; one that names none has accuracies.

        Raises:
            TypeError: its measure lacks a field, or has one more.
        """
        return cls(**result["measure"]) if result.get("measure") else ACCURACY

    @property
    def test_key(self) -> str:
        """Where `result.json` has the value on the test set."""
        return f"test_{self.name}"

    @property
    def curve_key(self) -> str:
        """Where `result.json` has the validation's values, by epoch."""
        return f"{self.name}_by_epoch"

    @property
    def speed_key(self) -> str:
        """Where `result.json` has the speed."""
        return f"{self.items}_per_s"

    @property
    def speed_unit(self) -> str:
        """The unit of the speed."""
        return f"{self.items}/s"

    @property
    def scale(self) -> float:
        """What a value is multiplied with where it is shown."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def difference_unit(self) -> str:
        """The unit of the difference of two shown values."""
        return "points" if self.unit == "%" else self.unit

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value that can be shown."""
        return (0.0, 100.0) if self.unit == "%" else (0.0, float("inf"))

    def number(self, value: float, sign: str = "") -> str:
        """A value or a difference as text, without its unit; `sign` is "+" to show it always."""
        return f"{self.scale * value:{sign}.{2 if self.unit == '%' else 4}f}"


ACCURACY = Measure("accuracy", "%", "higher", "images")
