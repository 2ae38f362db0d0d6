"""The comparison of runs, `normplug.experiment.compare`, and `python -m normplug.compare RUNS`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from normplug._checks import needs

if TYPE_CHECKING:
    from normplug.experiment.compare import PLOTS, Comparison, compare

__all__ = ["PLOTS", "Comparison", "compare"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("normplug.compare", "train"):
        return getattr(import_module("normplug.experiment.compare"), name)


if __name__ == "__main__":
    with needs("normplug.compare", "train", SystemExit):
        from normplug.experiment.compare import main
    sys.exit(main())
