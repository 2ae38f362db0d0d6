"""The names of arms, which `experiment` and `compare` share."""

from __future__ import annotations

BASELINE = "baseline"  # the arm whose model is not swapped
# Arms to compare the others with: the first that has a finished run. Both compute stock norms.
REFERENCES = (BASELINE, "standard")
ARM_ORDER = (*REFERENCES, "golden")  # in tables; other arms follow, sorted by name
