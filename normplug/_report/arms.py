"""What `experiment` and `compare` share: the names of arms, and of the file of a refused run."""

from __future__ import annotations

BASELINE = "baseline"  # the arm whose model is not swapped
# Arms to compare the others with: the first that has a finished run. Both compute stock norms.
REFERENCES = (BASELINE, "standard")
ARM_ORDER = (*REFERENCES, "golden")  # in tables; other arms follow, sorted by name
REFUSAL = "refused.txt"  # next to a finished result: why the current sweep could not use it
