"""The callbacks and plug-ins for trainers of other libraries, in one place.

`SwapNorms`, `SyncNorms` and `VarianceLogger` are for Lightning's Trainer, `NormCallback` for that
of transformers. A library is imported when one of its names is used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normplug.lightning import SwapNorms as SwapNorms
    from normplug.lightning import SyncNorms as SyncNorms
    from normplug.lightning import VarianceLogger as VarianceLogger
    from normplug.transformers import NormCallback as NormCallback

# Name -> its library, which is also the name of the module of normplug that has it.
_LIBRARIES = {
    "NormCallback": "transformers",
    "SwapNorms": "lightning",
    "SyncNorms": "lightning",
    "VarianceLogger": "lightning",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_LIBRARIES`."""
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"normplug.{_LIBRARIES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    """The names whose libraries are installed, so that `help` can show them."""
    installed = [name for name, library in _LIBRARIES.items() if find_spec(library)]
    return sorted({*globals(), *installed})
