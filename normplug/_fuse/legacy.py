"""The names that pickles of earlier versions use for functions that have moved since.

`normplug.fuse` was a module, and is a function now. So the old modules are made here and put into
`sys.modules` only: pickle finds them there, and they do not shadow the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def _restore(*arguments: Any) -> Any:
    from normplug._fuse.fused_class import restore  # not before it is needed

    return restore(*arguments)


def _load(versions: str, fingerprint: str, contents: Any) -> None:
    """No fusion: the functions that an earlier version's code calls are gone."""


for _name, _contents in (
    ("normplug.fuse", {"_restore": _restore}),
    ("normplug._fusion", {"restore": _restore, "load": _load}),
):
    vars(sys.modules.setdefault(_name, ModuleType(_name, __doc__))).update(_contents)
