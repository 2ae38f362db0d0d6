"""Compare the runs of a study: `python -m normplug.compare RUNS`, or `compare` in Python."""

import sys

from normplug._checks import MissingPackage, needs

# `python -m` imports this file before `__main__`; until then, sys.argv[0] is "-m".
with needs(
    "normplug.compare", "train", SystemExit if sys.argv[0] == "-m" else MissingPackage
):
    from normplug.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
