"""Compare the runs of a study: `python -m normplug.compare RUNS`, or `compare` in Python."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from normplug._checks import MissingPackage, needs

if TYPE_CHECKING:
    from normplug.compare.__main__ import main as main
    from normplug.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]

# `python -m` imports this file before `__main__`; until then, sys.argv[0] is "-m".
with needs(
    "normplug.compare", "train", SystemExit if sys.argv[0] == "-m" else MissingPackage
):
    for _package in ("matplotlib", "pandas", "pydantic", "scipy", "tabulate"):
        if find_spec(_package) is None:
            raise ModuleNotFoundError(_package, name=_package)

# Imported on first use: training needs the measures alone.
_LATE = {"Comparison": "comparison", "compare": "comparison", "main": "__main__"}


def __getattr__(name: str) -> Any:
    """Import a name of `_LATE`."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
