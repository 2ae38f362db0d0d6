"""Register normplug's layers with Opacus, which looks layers up by their exact class."""

from __future__ import annotations

import sys
from typing import Any

from normplug import _convert


def tell_opacus() -> None:
    """If Opacus is in use, have it treat normplug's layers like the stock ones.

    Otherwise it would accept a BatchNorm of an unknown class as private. Running statistics that
    are only watched are not private either; its `fix` removes them.
    """
    opacus = sys.modules.get("opacus.validators")
    if opacus is None:
        return
    validators, fixers = opacus.ModuleValidator.VALIDATORS, opacus.ModuleValidator.FIXERS
    for stock, ours in _convert.REPLACEMENTS.items():
        for known in (validators, fixers):
            if stock in known:
                known.setdefault(ours, known[stock])
        fixers.setdefault(ours, _without_watching)


def _without_watching(layer: Any, **options: Any) -> Any:
    layer.stop_watching()
    return layer
