"""The result of a run as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from tables import NOT_SEARCHED, markdown

Row = Mapping[str, Any]

# "unsteady": the stock model differs from itself from run to run, or if rounded differently.
RESULTS = ("ok", "none taken", "failed", "unsteady", "skipped")
SUMMARY = ("library", "architectures", *RESULTS, "norms taken", "left")
ARCHITECTURES = ("architecture", "norms taken", "norms left", "result", "error")


def render(rows: Sequence[Row]) -> str:
    """The whole document, from the rows of `python benchmarks/zoo`."""
    packages = ("python", "torch", "torchvision", "timm", "transformers", "diffusers")
    versions = ", ".join(
        f"{name} {rows[0][name]}" for name in packages if name in rows[0]
    )
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    # A row that was not run again has the date of its own run.
    dates = " to ".join(sorted({row["date"][:10] for row in rows}))
    parts = [
        f"{NOT_SEARCHED}# Swapped architectures of other libraries\n",
        f"`python benchmarks/zoo`, {rows[0]['device']}, {versions}, {dates}.\n",
        "Each architecture is built with random weights and a small input. The weights, biases and "
        "running statistics of its norms are random too. `standard` is compared with the stock "
        "model, and `golden` with the stock model whose norms have weight * sqrt(tv). The "
        "comparison covers the outputs in evaluation and in training, the gradients of all "
        "parameters, and the running statistics after the step. Each forward starts from the same "
        "seed, so dropout draws the same values. `unswap` must give back classes, attributes and "
        "outputs; `unswap(fold=False)` must give back every bit. The error is the largest relative "
        "difference of any golden or unswapped value; 0 is bit for bit.\n",
        _summary_table(rows, libraries),
        "## What is left, and why\n",
        _left(rows),
    ]
    for library in libraries:
        parts += [
            f"## {library}\n",
            _table(row for row in rows if row["library"] == library),
        ]
    return "\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """One line per library: the count of each result."""
    results: dict[str, Counter[str]] = {}
    for row in rows:
        results.setdefault(row["library"], Counter())[row["result"]] += 1
    return "\n".join(
        f"{library}: {', '.join(f'{n} {result}' for result, n in counted.items())}"
        for library, counted in results.items()
    )


def _summary_table(rows: Sequence[Row], libraries: Iterable[str]) -> str:
    lines = []
    for library in libraries:
        own = [row for row in rows if row["library"] == library]
        results = Counter(row["result"] for row in own)
        counts = [results[result] for result in RESULTS]
        norms = [
            sum(sum(row.get(key, {}).values()) for row in own)
            for key in ("taken", "left")
        ]
        lines.append([library, *map(str, (len(own), *counts, *norms))])
    return markdown(pd.DataFrame(lines, columns=SUMMARY).set_index("library"))


def _table(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        error = (
            f"{row['error']:.0e}" if row.get("error") else "0" if "error" in row else ""
        )
        result = f"{row['result']}: {row['reason']}" if row["reason"] else row["result"]
        lines.append(
            [row["name"], _kinds(row, "taken"), _kinds(row, "left"), result, error]
        )
    return markdown(
        pd.DataFrame(lines, columns=ARCHITECTURES).set_index([*ARCHITECTURES[:4]])
    )


def _kinds(row: Row, key: str) -> str:
    return ", ".join(
        f"{n} {kind.partition(' (')[0]}" for kind, n in row.get(key, {}).items()
    )


def _left(rows: Iterable[Row]) -> str:
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for kind in row.get("left", {}):
            name, _, note = kind.partition(" (")
            kinds.setdefault(note.removesuffix(")"), set()).add(name)
    lines = [f"- {note}: {', '.join(sorted(names))}" for note, names in kinds.items()]
    return "\n".join(lines or ["- nothing"]) + "\n"
