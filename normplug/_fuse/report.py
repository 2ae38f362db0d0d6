"""The report of `fusions`, and how a stored one is brought up to date; nothing here traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from normplug import _convert
from normplug._fuse.fused_class import has_fused_class, plain_class
from normplug._fuse.fusion import FUSION, Fusion
from normplug._table import counts, shown, table
from normplug.modules import TargetVarianceNorm

NOT_SWAPPED = "not swapped"


class Fused(NamedTuple):
    """One norm layer, and what it is fused with.

    Attributes:
        path: its name in the model; "" is the model itself.
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
class Fusions:
    """Every norm layer of a model, in order; `print` it for a table."""

    rows: tuple[Fused, ...]

    def __iter__(self) -> Iterator[Fused]:
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


def kept(model: nn.Module) -> Fusions | None:
    """The stored report of a fused model, brought up to date; None if nothing is fused."""
    modules = dict(model.named_modules())
    reports: dict[tuple[Any, ...], dict[str, Fused]] = {}
    for path, module in modules.items():
        fusion: Fusion | None = vars(module).get(FUSION)
        if fusion is not None:
            moved = _common(fusion.path, path)
            key = id(fusion.found), *moved  # the modules of one call of `fuse` share its rows
            if key not in reports:
                reports[key] = _at(fusion, *moved)
    # Outer modules come first; the report of an inner one is of a later call of `fuse`.
    found = {path: row for report in reports.values() for path, row in report.items()}
    if not found:
        return None
    rows = (
        Fused(path, _convert.plain_class(m).__name__, *_now(m, found.get(path), modules))
        for path, m in _convert.norm_layers(model)
    )
    return Fusions(tuple(rows))


def _now(
    norm: nn.Module, row: Fused | None, modules: dict[str, nn.Module]
) -> tuple[str | None, str, str]:
    """A norm's label, owner and note now, given its stored row and the model's modules now."""
    if not isinstance(norm, TargetVarianceNorm):
        return None, "", NOT_SWAPPED
    if row is None or row.note == NOT_SWAPPED:
        return None, "", "it was added or swapped after normplug.fuse"
    if row.label is None:
        return None, "", row.note
    owner = modules.get(row.owner)
    if owner is None:
        return None, "", "its caller is not in the model"
    name, fusion = plain_class(owner).__name__, vars(owner).get(FUSION)
    if fusion is None or not has_fused_class(owner):
        return None, "", f"{name} is no longer fused"
    child = next((name for name, child in owner._modules.items() if child is norm), "")
    label = fusion.label(owner, child, row.label)
    if not label:
        return None, "", f"{name} has changed since normplug.fuse, and is not fused now"
    return label, row.owner, ""


def _common(old: str, new: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths, in the old and the new model, of the largest module around one that is in both."""
    then, now = _parts(old), _parts(new)
    while then and now and then[-1] == now[-1]:
        then, now = then[:-1], now[:-1]
    return then, now


def _at(fusion: Fusion, then: tuple[str, ...], now: tuple[str, ...]) -> dict[str, Fused]:
    """The stored rows by their paths in a model that has at `now` what was at `then`."""
    rows = {}
    for row in map(Fused._make, fusion.found):
        moved, owner = (_moved(p, then, now) for p in (row.path, row.owner))
        if moved is not None and owner is not None:
            rows[moved] = row._replace(owner=owner)
        elif moved is not None:
            rows[moved] = row._replace(
                label=None, note=row.note or "its caller is not in the model"
            )
    return rows


def _moved(path: str, then: tuple[str, ...], now: tuple[str, ...]) -> str | None:
    """Replace the prefix `then` of a path by `now`; None if the path has another prefix."""
    parts = _parts(path)
    return ".".join(now + parts[len(then) :]) if parts[: len(then)] == then else None


def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()
