"""The names that pickles of earlier versions use for what lies elsewhere now.

A pickle of a fused module names the function that makes it, by the module that had it then.
`normplug.fuse` was such a module, and is a function now; so these modules are made here, where
`pickle` finds them and `import` does not put them before the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from normplug._fuse.fused_class import restore


def _load(versions: str, fingerprint: str, contents: Any) -> None:
    """No fusion: the functions that an earlier version's code calls are gone."""


_NAMES: dict[str, dict[str, Any]] = {
    "normplug.fuse": {"_restore": restore},
    "normplug._fusion": {"restore": restore, "load": _load},
}


def register() -> None:
    """Let `pickle` find the names of earlier versions."""
    for name, contents in _NAMES.items():
        module = sys.modules.setdefault(name, ModuleType(name, __doc__))
        vars(module).update(contents)
