"""Write the comparison as Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
from tabulate import tabulate

from normplug._measure import ACCURACY, Measure
from normplug.compare.runs import Group, intervals, label

NOTHING = "-"
LONGEST = 300  # characters of an error
RATE = "optimizer.lr"
LEFT_OUT = (RATE, "seed", "study")  # options that the sweep over seeds sets itself
HOW_TO_READ = """\
Only finished runs are averaged: n of all seeds in the table. ± is half of the 95% t-interval over
seeds. Differences are paired by seed, and p is adjusted by Holm for the number of arms. Speeds and
the peak memory are medians over runs, which ran at different times or side by side:
`python -m normplug.experiment.speed` times the arms in turns. docs/experiments.md explains more.
"""


def render(groups: Sequence[Group], unusable: Mapping[str, str], where: str) -> str:
    """The whole report on the runs of `where`: groups, unusable files, and how to read it."""
    count = sum(len(group.every) for group in groups) + len(unusable)
    parts = [
        f"# Comparison of {count_of(count, 'run')} in {where}\n",
        *map(_section, groups),
    ]
    if unusable:
        lines = [f"{name}: {shorten(why, LONGEST)}" for name, why in unusable.items()]
        parts.append(f"## Failed: result.json could not be used\n\n{bullets(lines)}")
    return "\n".join([*parts, HOW_TO_READ])


def _section(group: Group) -> str:
    measure, texts = group.measure, group.finished.text_sha256
    parts = [f"## {group.title}\n", f"{about_reference(group)}.\n"]
    if texts[texts != ""].nunique() > 1:
        parts.append(
            "**Warning: the runs have different texts, so their losses cannot be compared**, by "
            f"SHA-256: {_counted(texts.str[:12])}.\n"
        )
    parts.append(_outcomes(group))
    lines = not_averaged(group)
    if lines:
        parts.append(f"Not in these numbers:\n\n{bullets(lines)}")
    score = f"Test {measure.name} is on the test set, after the last epoch"
    parts.append(f"{score}; {measure.better} is better.\n")
    if group.every.groupby("plain_arm").learning_rate.nunique().max() > 1:
        parts.append(rate_table(group.every.assign(arm=group.every.plain_arm))[0])
    parts.append(_gaps(group))
    return "\n".join([*filter(None, parts), _costs(group), bullets(_provenance(group))])


def not_averaged(group: Group) -> list[str]:
    """A line for each run that no mean includes."""
    without = group.runs[(group.runs.status != "finished") | group.runs.test_score.isna()]
    nothing = f"no test {group.measure.name}"
    return [
        f"{label(run.arm)}, seed {run.seed}: {run.status}: "
        f"{shorten(run.error, LONGEST) or nothing} ({run.run})"
        for run in without.itertuples()
    ]


def about_reference(group: Group) -> str:
    """A sentence that names the reference, and the arms that it stands in for."""
    text = f"Reference: {label(group.reference or 'none')}"
    if group.lacking:
        text += f", since no arm named {group.lacking} has a finished run"
    return text


def _outcomes(group: Group) -> str:
    """The table of the test score of each arm, and its difference from the reference."""
    measure, rows = group.measure, group.table
    minus = f"minus {label(group.reference or 'reference')}, {measure.difference_unit}"
    differences = interval_texts(measure, rows, "difference_to_reference", "+")
    validation = interval_texts(measure, rows, "validation_difference_to_reference", "+")
    cells = {
        "arm": rows.arm.map(label),
        "n": rows.n_finished.astype(str) + " of " + rows.n_expected.astype(str),
        "diverged": list(map(_diverged, rows.n_diverged, rows.n_far_off)),
        f"test {measure.name}, {measure.unit}": interval_texts(measure, rows, "test"),
        "bits per character": interval_texts(measure, rows, "test_bits"),
        minus: differences.where(rows.arm != group.reference, "reference"),
        "p (Holm)": rows.difference_to_reference_p_holm.map(p_text, na_action="ignore"),
        f"validation {minus}": validation,
    }
    if group.margin is not None:
        ps = rows.difference_to_reference_p_equivalent.map(p_text, na_action="ignore")
        cells[f"p (TOST, within ± {group.margin:g} {measure.difference_unit})"] = ps
    return table_text(pd.DataFrame(cells))


def _diverged(stopped: int, far_off: int) -> str:
    texts = []
    if stopped:
        texts.append(f"{stopped} stopped")
    if far_off:
        texts.append(f"{far_off} far off")
    return ", ".join(texts)


def _gaps(group: Group) -> str:
    """The table of the validation of each arm minus the reference's, at up to 6 epochs."""
    measure = group.measure
    cells: dict[str, dict[str, str]] = {}
    for arm, gap in group.gaps().items():
        picked = np.linspace(0, gap.shape[1] - 1, min(6, gap.shape[1])).round()
        for epoch, *interval in intervals(gap).iloc[picked].itertuples():
            cells.setdefault(f"epoch {epoch}", {})[label(arm)] = _cell(
                measure, "+", *interval
            )
    if len(cells) < 2:
        return ""
    table = pd.DataFrame(cells).rename_axis("arm").reset_index()
    minus = f"minus {label(group.reference or '')}, {measure.difference_unit}, same seed"
    return f"The validation {measure.name} {minus}:\n\n{table_text(table)}"


def _cell(measure: Measure, sign: str, n: float, mean: float, half: float) -> str:
    text = measure.number(mean, sign) if n else NOTHING
    return text + (f" ± {measure.number(half)}" if n > 1 else "")


def interval_texts(
    measure: Measure, rows: pd.DataFrame, name: str, sign: str = ""
) -> pd.Series[str]:
    """The cells of an interval of the table; a difference, with a sign, names its pairs."""
    texts = []
    for row in rows.to_dict("records"):
        n = row[f"{name}_n"]
        mean = row[f"{name}_mean"]
        text = _cell(measure, sign, n, mean, row[f"{name}_t95_half_width"])
        if n and sign:
            text += f" ({count_of(int(n), 'pair')})"
        texts.append(text)
    return pd.Series(texts, rows.index, dtype=object)


def _costs(group: Group) -> str:
    """The table of speed, peak memory and swapped norms of each arm."""
    rows = group.table
    speeds = rows.items_per_s_median.map(_rounded, na_action="ignore")
    cells = {
        "arm": rows.arm.map(label),
        f"{group.measure.items}/s": speeds,
        "step, ms": rows.step_ms_median.map("{:.2f}".format, na_action="ignore"),
        "peak, MiB": rows.peak_memory_mib_median.map(_rounded, na_action="ignore"),
        "norms swapped": rows.norms_swapped.map("{:d}".format, na_action="ignore"),
    }
    return table_text(pd.DataFrame(cells))


def p_text(p: float) -> str:
    """A p-value with three decimals, but never 0."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _provenance(group: Group) -> list[str]:
    """Hardware, versions, epochs, rates and dates of the finished runs, and how they differ."""
    runs = group.every[group.every.status == "finished"]
    if runs.empty:
        return []
    named = [name for name in ("hardware", "commit") if runs[name].any()]
    lines = [f"{name}: {_counted(runs[name])}" for name in named]
    versions = pd.DataFrame(list(runs.versions)).fillna("none")
    of_all = [f"{name} {_counted(versions[name])}" for name in sorted(versions)]
    lines += [f"versions: {', '.join(of_all)}", f"epochs: {_counted(runs.epochs)}"]
    for rate, arms in runs.groupby("learning_rate").plain_arm:
        lines.append(
            f"learning rate {rate:g}: {', '.join(sorted(map(label, set(arms))))}"
        )
    days = sorted({runs.date.min()[:10], runs.date.max()[:10]})
    return [*lines, f"dates: {' to '.join(days)}"]


def rate_table(runs: pd.DataFrame) -> tuple[str, dict[str, float]]:
    """The mean validation of each arm with each learning rate, and arm -> best rate.

    A rate counts if each seed of the arm finished with it. Of equal scores, the smaller rate is the
    best. The sensitivity is as in Wortsman et al. 2023 (arXiv:2309.14322).
    """
    done = runs[runs.status == "finished"]
    measure = next(iter(done.measure), ACCURACY)
    scores = _complete_means(runs, done)
    gains = scores if measure.better == "higher" else -scores
    best = gains.idxmax(axis=1)
    sensitivity = gains.max(axis=1) - gains.mean(axis=1)

    cells = scores.map(measure.number, na_action="ignore")
    for run in runs[runs.status == "diverged"].itertuples():
        cells.loc[run.arm, run.learning_rate] = "diverged"
    cells = cells.sort_index(axis=1)
    lowest = cells.apply(pd.Series.first_valid_index, axis=1)
    highest = cells.apply(pd.Series.last_valid_index, axis=1)
    chosen = best.reindex(cells.index)
    at_end = (lowest != highest) & ((chosen == lowest) | (chosen == highest))
    cells = cells.rename(columns="{:g}".format)
    cells["best"] = best.map("{:g}".format)
    cells["sensitivity"] = sensitivity.map(measure.number)
    cells["remark"] = np.where(at_end, "at the end of the range: extend it", "")
    about = (
        f"The best rate has the best mean validation {measure.name} after the last epoch, over all "
        "seeds of the arm. The sensitivity is how far it lies above the mean over all rates.\n"
    )
    table = table_text(cells.rename(label).rename_axis("arm").reset_index())
    return f"{table}\n{about}", dict(best)


def _complete_means(runs: pd.DataFrame, done: pd.DataFrame) -> pd.DataFrame:
    """The mean validation of each arm with each rate with which all seeds of the arm finished."""
    keys = ["arm", "seed"]
    values = done.pivot_table("validation_score", keys, "learning_rate", "last")
    pairs = pd.MultiIndex.from_frame(runs[keys].drop_duplicates())
    by_arm = values.reindex(pairs).groupby("arm", sort=False)
    complete = by_arm.count().eq(by_arm.size(), axis=0)
    return by_arm.mean().where(complete).dropna(how="all")


def best_rates(runs: pd.DataFrame) -> tuple[str, list[list[str]]]:
    """The `rate_table`s of a sweep, and each arm's options with its best rate, for other seeds."""
    known = runs[runs.learning_rate.notna() & runs.overrides.astype(bool)]
    if known.empty:
        raise ValueError(
            "normplug.compare: no run has the keys learning_rate and overrides in its result.json. "
            "train.py writes them: repeat the sweep."
        )
    tables: list[str] = []
    chosen: list[list[str]] = []
    for (model, data), found in known.groupby(["model", "data"], sort=False):
        table, best = rate_table(found)
        tables.append(f"## {model} on {data}\n\n{table}")
        for arm, rate in best.items():
            options = found.overrides[found.arm == arm].iloc[0]
            kept = [o for o in options if o.lstrip("+").split("=")[0] not in LEFT_OUT]
            chosen.append([*kept, f"{RATE}={rate}"])
    return "\n".join(tables), chosen


def table_text(
    cells: pd.DataFrame,
    left: int = 1,
    style: str = "pipe",
    widths: list[int] | None = None,
) -> str:
    """A table of texts without its empty columns; from column `left` on, aligned to the right.

    `style` is a `tablefmt` of tabulate, and `widths` the most characters of the first columns.
    """
    cells = cells.astype(object).replace(["", NOTHING], np.nan).dropna(axis=1, how="all")
    cells = cells.fillna(NOTHING).map(lambda cell: cell.replace("|", "/"))
    text = tabulate(
        cells,
        headers="keys",
        tablefmt=style,
        showindex=False,
        disable_numparse=True,
        colalign=["left"] * left + ["right"] * (cells.shape[1] - left),
        maxcolwidths=widths,
    )
    return f"{text}\n"


def count_of(number: int, what: str) -> str:
    """A number of things in words: "1 run", "2 runs"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _counted(values: pd.Series[Any]) -> str:
    """The different values, the most frequent first, with the number of runs of each."""
    counts = values.astype(str).value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(
        f"{value} ({count_of(count, 'run')})" for value, count in counts.items()
    )


def bullets(lines: Iterable[str]) -> str:
    """A list of lines."""
    return "".join(f"- {line}\n" for line in lines)
