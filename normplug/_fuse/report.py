"""The report of `fusions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from normplug import _convert
from normplug._fuse.analysis import Analysis
from normplug._fuse.edit import REASON
from normplug._fuse.fusion import FusedForwards
from normplug._fuse.sites import refusal
from normplug._table import counts, shown, table
from normplug.modules import TargetVarianceNorm


class Row(NamedTuple):
    """One norm layer, and what it is fused with.

    Attributes:
        path: its path in the model; "" is the model itself.
        kind: the name of its class.
        label: what it is fused with; None if it is not fused.
        owner: the module whose forward makes the fused call.
        note: why it is not fused; "" otherwise.
    """

    path: str
    kind: str
    label: str | None
    owner: str
    note: str


@dataclass(frozen=True)
class Report:
    """Every norm layer of a model, in order; `print` it for a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        rows = [("path", "class", "fused with", "notes")]
        for row in self.rows:
            note = f"in {shown(row.owner)}" if row.label else row.note
            rows.append((shown(row.path), row.kind, row.label or "-", note))
        return f"{table(rows)}\n{self.summary()}"

    def summary(self) -> str:
        """One line: how many norms are fused with what, how many are not, and why."""
        fused = Counter(f"with {row.label}" for row in self.rows if row.label)
        left = Counter(row.note for row in self.rows if not row.label)
        parts = [f"{fused.total()} of {len(self.rows)} norm layers fused: {counts(fused)}"]
        if left:
            parts.append("not fused: " + ", ".join(f"{n} ({why})" for why, n in left.items()))
        return "; ".join(parts)


def report(model: nn.Module, fusions: dict[nn.Module, FusedForwards], analysis: Analysis) -> Report:
    """List the norms of a model.

    Args:
        model: the model.
        fusions: its fused modules, or the modules to fuse.
        analysis: what can be fused in it.
    """
    paths = {module: path for path, module in model.named_modules()}
    fused, possible = _labels(fusions, paths), _labels(analysis.fusions, paths)
    rows = []
    for path, norm in _convert.norm_layers(model):
        label, owner, note = None, "", ""
        if not isinstance(norm, TargetVarianceNorm):
            note = "not swapped"
        elif norm in fused:
            label, owner = fused[norm]
        elif norm in possible:
            note = "not fused since the last change; normplug.fuse(model) fuses it"
        else:
            note = refusal(norm) or analysis.reasons.get(norm, REASON)
        rows.append(Row(path, _convert.plain_class(norm).__name__, label, owner, note))
    return Report(tuple(rows))


def _labels(
    fusions: dict[nn.Module, FusedForwards], paths: dict[nn.Module, str]
) -> dict[nn.Module, tuple[str, str]]:
    """Norm -> what it is fused with, and the path of the outermost module that fuses it."""
    found: dict[nn.Module, tuple[str, str]] = {}
    for module, path in paths.items():
        if module in fusions:
            for norm, label in fusions[module].labels(module).items():
                found.setdefault(norm, (label, path))
    return found
