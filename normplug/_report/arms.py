"""What experiments and their comparison have in common: the arms by name, and a run's refusal."""

from __future__ import annotations

BASELINE = "baseline"  # the arm whose model is not swapped
# What the other arms are compared with: the first that has a finished run. Both are stock norms.
REFERENCES = (BASELINE, "standard")
ARM_ORDER = (*REFERENCES, "golden")  # of a table; any others follow by name
REFUSAL = "refused.txt"  # beside a finished result: why the current sweep could not use it
