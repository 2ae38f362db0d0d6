"""Write the comparison as Markdown that also reads well in a terminal, and as CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from normplug.experiment.compare.frame import LONGEST, Group, label
from normplug.experiment.measure import REFERENCES, Measure

NOTHING = "-"
RUN_COLUMNS = (
    *("model", "data", "arm", "seed", "learning_rate", "status", "error", "test_score"),
    *("test_bits_per_character", "items_per_s", "step_ms", "loader_wait_ms", "peak_memory_bytes"),
    *("norms_swapped", "graph", "hardware", "commit", "date", "name", "unit", "better", "items"),
    *("averaged", "reference", "run"),
)
HOW_TO_READ = f"""## How to read the tables

- n: finished runs, of the seeds that any arm of the table has. Only finished runs are averaged.
- diverged: "stopped" counts runs that stopped at a loss that is not finite; they are in no mean.
  "far off" counts finished runs whose test is more than 5 interquartile ranges outside the
  quartiles of all runs; they are in the means, but off the axes of the plots.
- test accuracy, or test loss: on the test set, after the last epoch; mean over seeds ± half the
  width of the 95% t-interval. One seed has no interval. A lower loss is better.
- reference: the arm that the others are compared with. It is {REFERENCES[0]} where that arm has
  finished runs, else {REFERENCES[1]}, or what --reference names; each table names its own.
- minus the reference: mean and 95% t-interval of the differences, paired by seed. Each interval
  stands alone: with many arms, some will miss zero by chance. Arms are sorted by it.
- p (Holm): of a paired t-test that the difference is zero, adjusted by Holm's method for the
  number of arms in the table.
- validation minus the reference: the same differences of the validation after the last epoch,
  without p. They show whether the test and the validation, which chooses learning rates, agree.
- speed ratio: images/s or tokens/s over the reference's; geometric mean over seeds, by pairs that
  ran on the same hardware, and in brackets the lowest and highest. Above 1 is faster. Arms with
  CUDA graphs are compared with a reference that has them. "unclear" is a ratio no larger than that
  of the reference's own fastest and slowest runs.
- images/s or tokens/s, step and peak memory: medians over runs.
"""


def render(
    groups: Sequence[Group],
    tables: Sequence[pd.DataFrame],
    unreadable: Mapping[str, str],
    where: str,
) -> str:
    """The whole report: a section per group, then unreadable files, then how to read it.

    `tables` have the rows of each group; `where` names the sources of the runs.
    """
    count = sum(len(group.runs) + len(group.left_out) for group in groups) + len(unreadable)
    parts = [f"# Comparison of {_count(count, 'run')} in {where}\n"]
    parts += [_section(*each) for each in zip(groups, tables, strict=True)]
    if unreadable:
        lines = [f"{name}: {_one_line(why)}" for name, why in unreadable.items()]
        parts.append(f"## Failed: result.json could not be used\n\n{_bullets(lines)}")
    return "\n".join([*parts, HOW_TO_READ])


def runs_table(groups: Sequence[Group], unreadable: Mapping[str, str]) -> pd.DataFrame:
    """A row for each run; `averaged` is False for a run that no mean includes."""
    parts = []
    for group in groups:
        used = group.runs.assign(averaged=group.runs.status == "finished")
        place = {arm: number for number, arm in enumerate(group.arms)}
        used = used.sort_values(
            ["arm", "seed"], key=lambda c: c.map(place) if c.name == "arm" else c
        )
        both = pd.concat([used, group.left_out.assign(averaged=False)])
        measures = pd.DataFrame([vars(measure) for measure in both.measure], both.index)
        parts.append(pd.concat([both, measures], axis=1).assign(reference=group.reference))
    failed = [
        {"status": "failed", "error": why, "averaged": False, "run": name}
        for name, why in unreadable.items()
    ]
    found = pd.concat([*parts, pd.DataFrame(failed)]).reindex(columns=RUN_COLUMNS)
    return found.astype({"seed": "Int64"}).rename(columns={"name": "measure"})


def rates_report(choices: pd.DataFrame) -> str:
    """Tables of `best_rates`, one for each measure, each with the rule that made the choice."""
    return "\n".join(
        _rates_table(measure, of_one) for measure, of_one in choices.groupby("measure", sort=False)
    )


def _rates_table(measure: Measure, choices: pd.DataFrame) -> str:
    scores = pd.DataFrame(list(choices.scores)).sort_index(axis=1)
    cells = {"arm": list(choices.title)}
    for rate in scores:
        tried = [rate in of_arm for of_arm in choices.scores]
        cells[f"{rate:g}"] = [
            NOTHING if not known else "unfinished" if math.isnan(score) else measure.number(score)
            for known, score in zip(tried, scores[rate], strict=True)
        ]
    cells["best"] = [NOTHING if math.isnan(best) else f"{best:g}" for best in choices.best]
    cells["remark"] = [_remark(*each) for each in zip(choices.scores, choices.best, strict=True)]
    return (
        f"{_table(pd.DataFrame(cells))}\nThe best rate has the {measure.best} mean validation "
        f"{measure.name} after the last epoch, over all seeds of\nthe arm. A rate counts if each "
        "of these seeds finished with it. If scores are equal, the smaller\nrate is taken.\n"
    )


def _remark(scores: Mapping[float, float], best: float) -> str:
    """Why the choice may not be the best rate of an arm."""
    if math.isnan(best):
        return "no rate has finished runs of all seeds"
    at_end = len(scores) > 1 and best in (min(scores), max(scores))
    return "at the end of the range: extend it" if at_end else ""


def _section(group: Group, rows: pd.DataFrame) -> str:
    measure = group.measure
    parts = [f"## {group.title}\n", *_warnings(group), _outcomes(group, rows)]
    so = ": no differences, no speed ratios" if group.reference is None else ""
    parts.append(f"{group.about_reference}{so}.\n")
    if left := [*_not_averaged(group), *group.variances[1]]:
        parts.append(f"Not in these numbers, or not in the plots:\n\n{_bullets(left)}")
    parts.append(
        f"Test {measure.name} is on the test set, after the last epoch; {measure.better} is "
        "better.\n"
    )
    parts.append(_costs(group, rows))
    parts.append(_bullets(_provenance(group)))
    return "\n".join(parts)


def _outcomes(group: Group, rows: pd.DataFrame) -> str:
    """The table of the test score of each arm, and its difference from the reference."""
    measure, minus = group.measure, f"minus {label(group.reference or 'reference')}"
    scores = _intervals(measure, rows, "test")
    fewer = (rows.test_n > 0) & (rows.test_n < rows.n_finished)
    ps = rows.difference_to_reference_p_holm
    cells = pd.DataFrame(
        {
            "arm": rows.arm.map(label),
            "n": rows.n_finished.astype(str) + " of " + rows.n_expected.astype(str),
            "diverged": list(map(_diverged, rows.n_diverged, rows.n_far_off)),
            f"test {measure.name}, {measure.unit}": scores.where(
                ~fewer, scores + " (n = " + rows.test_n.astype(str) + ")"
            ),
            "bits per character": _intervals(measure, rows, "test_bits"),
            f"{minus}, {measure.difference_unit}": _intervals(
                measure, rows, "difference_to_reference", "+"
            ).where(rows.arm != group.reference, "reference"),
            "p (Holm)": [NOTHING if math.isnan(p) else p_text(p) for p in ps],
            f"validation {minus}, {measure.difference_unit}": _intervals(
                measure, rows, "validation_difference_to_reference", "+"
            ),
        }
    )
    unused = {
        "diverged": not (rows.n_diverged + rows.n_far_off).any(),
        "bits per character": not rows.test_bits_n.any(),
    }
    return _table(cells.drop(columns=[name for name, without in unused.items() if without]))


def _diverged(stopped: int, far_off: int) -> str:
    parts = [f"{stopped} stopped"] * bool(stopped) + [f"{far_off} far off"] * bool(far_off)
    return ", ".join(parts) or NOTHING


def _costs(group: Group, rows: pd.DataFrame) -> str:
    """The table of speed, peak memory and swapped norms of each arm."""
    cells = pd.DataFrame(
        {
            "arm": rows.arm.map(label),
            "speed ratio": [speed_text(row) for row in rows.to_dict("records")],
            group.measure.speed_unit: rows.items_per_s_median.map(_rounded),
            "step, ms": [NOTHING if math.isnan(ms) else f"{ms:.2f}" for ms in rows.step_ms_median],
            "peak, MiB": rows.peak_memory_mib_median.map(_rounded),
            "norms swapped": rows.norms_swapped.str.replace(" ", ", ").replace("", NOTHING),
        }
    )
    others = set(rows.speed_reference.dropna()) - {group.reference}
    names = " and ".join(label(arm) for arm in sorted(others))
    note = f"\nThe arms with CUDA graphs have the speed ratio to {names}.\n" if names else ""
    return _table(cells) + note


def speed_text(row: Mapping[str, Any]) -> str:
    """The speed ratio of a row of `summarise`, with its range; "unclear" within the noise."""
    ratio, spread = row["speed_ratio_geometric_mean"], row["speed_reference_spread"]
    if row["arm"] == row["speed_reference"]:
        return "reference"
    if not row["speed_ratio_n"]:
        return NOTHING
    if max(ratio, 1 / ratio) <= spread and spread > 1:
        return f"unclear: {label(row['speed_reference'])} varies by {100 * (spread - 1):.1f}%"
    if row["speed_ratio_n"] == 1:
        return f"{ratio:.3f} (1 pair)"
    low, high = row["speed_ratio_lowest"], row["speed_ratio_highest"]
    return f"{ratio:.3f} ({low:.3f} to {high:.3f}, {row['speed_ratio_n']} pairs)"


def p_text(p: float) -> str:
    """A p-value with three decimals, but never 0."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _table(cells: pd.DataFrame) -> str:
    """Text in the first column, and numbers aligned to the right in the others."""
    align = ["left", *["right"] * (cells.shape[1] - 1)]
    cells = cells.map(lambda cell: cell.replace("|", "/"))
    return f"{cells.to_markdown(index=False, colalign=align, disable_numparse=True)}\n"


def _intervals(measure: Measure, rows: pd.DataFrame, name: str, sign: str = "") -> pd.Series[str]:
    """The cells of an interval of `summarise`; a difference, with a sign, names its pairs."""
    cells = []
    for n, mean, half in rows[[f"{name}_{p}" for p in ("n", "mean", "t95_half_width")]].to_numpy():
        text = measure.number(mean, sign) if n else NOTHING
        text += f" ± {measure.number(half)}" if n > 1 else ""
        cells.append(text + f" ({_count(int(n), 'pair')})" * bool(n and sign))
    return pd.Series(cells, rows.index, dtype=object)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _rounded(value: float) -> str:
    if math.isnan(value):
        return NOTHING
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _warnings(group: Group) -> list[str]:
    """Warnings about runs that cannot be compared."""
    texts = group.finished.text_sha256[group.finished.text_sha256 != ""]
    if texts.nunique() < 2:
        return []
    return [
        f"**Warning: the runs have different texts**, by SHA-256: {_counted(texts.str[:12])}. "
        "Their losses cannot be compared: train all arms on one text (data.path).\n"
    ]


def _not_averaged(group: Group) -> list[str]:
    """Why runs are not averaged; seeds with the same reason share a line."""
    reasons: dict[tuple[str, str], list[int]] = {}
    runs = {(run.arm, run.seed): run for run in group.runs.itertuples()}
    for arm in group.arms:
        for seed in group.seeds:
            if reason := _reason(runs.get((arm, seed)), group.measure):
                reasons.setdefault((arm, reason), []).append(seed)
    lines = [
        f"{label(arm)}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}: {reason}"
        for (arm, reason), seeds in reasons.items()
    ]
    for run in group.left_out.itertuples():
        lines.append(
            f"{label(run.arm)}, seed {run.seed}: a second run, {run.run} ({run.status}), left out "
            f"for {runs[run.arm, run.seed].run}; if both are intended, compare them separately"
        )
    return lines


def _reason(run: Any, measure: Measure) -> str:
    """Why a run is not averaged; empty if it is."""
    if run is None:
        return "missing: another arm has this seed, this arm has no run with it"
    if run.status in ("failed", "diverged"):
        return f"{run.status}: {_one_line(run.error) or 'no error given'} ({run.run})"
    if run.status != "finished":
        return f'unfinished: its status is "{run.status}" ({run.run})'
    return f"finished, but no test {measure.name} ({run.run})" * math.isnan(run.test_score)


def _provenance(group: Group) -> list[str]:
    """Hardware, versions, epochs and dates of the finished runs, and how they differ."""
    runs = group.finished
    if runs.empty:
        return ["no finished run, so no hardware, versions, epochs or dates to state"]
    differs = ". It differs: speed ratios come from pairs on the same hardware only"
    lines = [f"hardware: {_counted(runs.hardware)}{differs * (runs.hardware.nunique() > 1)}"]
    if runs.commit.any():
        lines.append(f"commit: {_counted(runs.commit)}")
    versions = pd.DataFrame(list(runs.versions)).fillna("none").sort_index(axis=1)
    same = [f"{name} {versions[name].iloc[0]}" for name in versions if versions[name].nunique() < 2]
    lines.append(f"versions: {', '.join(same) or 'none that all runs share'}")
    lines += [
        f"version differs: {name} {_counted(versions[name])}"
        for name in versions
        if versions[name].nunique() > 1
    ]
    lines.append(f"epochs{' differ' * (runs.epochs.nunique() > 1)}: {_counted(runs.epochs)}")
    rates = runs.dropna(subset="learning_rate").groupby("learning_rate").arm.unique()
    if len(rates) == 1:
        lines.append(f"learning rate: {rates.index[0]:g}")
    elif len(rates):
        arms = {
            rate: [label(arm) for arm in group.arms if arm in rates[rate]] for rate in rates.index
        }
        texts = [f"{rate:g} ({', '.join(of_rate)})" for rate, of_rate in arms.items()]
        lines.append(f"learning rate differs: {', '.join(texts)}")
    days = sorted({date[:10] or "unknown" for date in runs.date})
    lines.append(f"dates: {' to '.join(dict.fromkeys((days[0], days[-1])))}")
    return lines


def _counted(values: pd.Series[Any]) -> str:
    """The different values, the most frequent first, with the number of runs of each."""
    counts = values.astype(str).value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(f"{value} ({_count(count, 'run')})" for value, count in counts.items())


def _one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST]


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
