"""The comparison of runs, and `python -m normplug.compare RUNS`."""

import sys

from normplug._checks import MissingPackage, needs

with needs("normplug.compare", "train", SystemExit if __name__ == "__main__" else MissingPackage):
    from normplug.experiment.compare import Comparison, compare, main

__all__ = ["Comparison", "compare"]

if __name__ == "__main__":
    sys.exit(main())
