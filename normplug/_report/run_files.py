"""The names of files that a run leaves in its directory, for those that write and read them."""

from __future__ import annotations

RESULT = "result.json"
REFUSAL = "refused.txt"  # next to a finished result: why the current sweep could not use it
METRICS = "metrics.csv"
VARIANCE = "variance.csv"
