"""Write the comparison as Markdown that also reads well in a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from normplug._report.arms import REFERENCES
from normplug._report.intervals import Interval
from normplug._report.markdown import table
from normplug._report.measure import Measure
from normplug.compare.gather import Group, Run
from normplug.compare.stats import Row, p_text

NOTHING = "-"
HOW_TO_READ = f"""## How to read the tables

- n: finished runs, of the seeds that any arm of the table has. Only finished runs are averaged.
- test accuracy, or test loss: on the test set, after the last epoch; mean over seeds ± half the
  width of the 95% t-interval. One seed has no interval. A lower loss is better.
- reference: the arm that the others are compared with. It is {REFERENCES[0]} where that arm has
  finished runs, else {REFERENCES[1]}, or what --reference names; each table names its own.
- minus the reference: mean and 95% t-interval of the differences, paired by seed. Each interval
  stands alone: with many arms, some will miss zero by chance.
- p (Holm): of a paired t-test that the difference is zero, adjusted by Holm's method for the
  number of arms in the table.
- validation minus the reference: the same differences of the validation after the last epoch,
  without p. They show whether the test and the validation, which chooses learning rates, agree.
- speed ratio: images/s or tokens/s over that of the reference; geometric mean over seeds, by
  pairs that ran on the same hardware. Above 1 is faster.
- images/s or tokens/s, step and peak memory: medians over runs.
"""


def render(
    groups: Sequence[Group],
    tables: Sequence[Sequence[Row]],
    notes: Sequence[Sequence[str]],
    unreadable: Mapping[str, str],
    where: str,
) -> str:
    """Return the whole report: a section per group, then unreadable files, then how to read it.

    `tables` have the rows of each group, and `notes` what it lacks besides runs; `where` names the
    sources of the runs.
    """
    count = sum(len(runs) for group in groups for runs in group.arms.values())
    count += sum(len(group.left_out) for group in groups) + len(unreadable)
    parts = [f"# Comparison of {count} run{'s' * (count != 1)} in {where}\n"]
    parts += [_section(*each) for each in zip(groups, tables, notes, strict=True)]
    if unreadable:
        lines = [f"{name}: {why}" for name, why in unreadable.items()]
        parts.append(f"## Failed: result.json could not be read\n\n{_bullets(lines)}")
    return "\n".join([*parts, HOW_TO_READ])


def _section(group: Group, rows: Sequence[Row], notes: Sequence[str]) -> str:
    parts = [f"## {group.title}\n", *_warnings(group), _outcome_table(group, rows)]
    so = ": no differences, no speed ratios" if group.reference is None else ""
    parts.append(f"{group.about_reference}{so}.\n")
    if left := [*_not_averaged(group), *notes]:
        parts.append(f"Not in these numbers, or not in the plots:\n\n{_bullets(left)}")
    measure = group.measure
    parts.append(
        f"Test {measure.name} is on the test set, after the last epoch; {measure.better} is "
        "better.\n"
    )
    parts.append(_cost_table(group, rows))
    parts.append(_bullets(_provenance(group)))
    return "\n".join(parts)


def _outcome_table(group: Group, rows: Sequence[Row]) -> str:
    """Return a table of the test score of each arm, and its difference from the reference."""
    measure = group.measure
    bits = any(row.test_bits for row in rows)
    header = (
        "arm",
        "n",
        f"test {measure.name}, {measure.unit}",
        *["bits per character"] * bits,
        f"minus {group.reference or 'reference'}, {measure.difference_unit}",
        "p (Holm)",
        f"validation minus {group.reference or 'reference'}, {measure.difference_unit}",
    )
    return table(header, (_outcome(row, bits) for row in rows), padded=True)


def _outcome(row: Row, bits: bool) -> tuple[str, ...]:
    score = _shown(row.measure, row.test_score, "")
    if row.test_score and row.test_score.n < row.n_finished:
        score += f" (n = {row.test_score.n})"
    return (
        row.arm,
        f"{row.n_finished} of {row.n_expected}",
        score,
        *[_shown(row.measure, row.test_bits, "")] * bits,
        "reference" if row.arm == row.reference else _difference(row.measure, row.difference),
        NOTHING if row.p is None else p_text(row.p),
        _difference(row.measure, row.validation_difference),
    )


def _cost_table(group: Group, rows: Sequence[Row]) -> str:
    """Return a table of speed, peak memory and swapped norms of each arm."""
    speed = group.measure.speed_unit
    header = ("arm", "speed ratio", speed, "step, ms", "peak, MiB", "norms swapped")
    return table(header, map(_cost, rows), padded=True)


def _cost(row: Row) -> tuple[str, ...]:
    ratio = NOTHING
    if row.speed_ratio is not None:
        ratio = f"{row.speed_ratio:.3f} ({_pairs(row.speed_pairs)})"
    return (
        row.arm,
        "reference" if row.arm == row.reference else ratio,
        _rounded(row.items_per_s),
        NOTHING if row.step_ms is None else f"{row.step_ms:.2f}",
        _rounded(row.peak_memory_mib),
        ", ".join(map(str, row.norms_swapped)) or NOTHING,
    )


def _shown(measure: Measure, interval: Interval | None, sign: str) -> str:
    if interval is None:
        return NOTHING
    mean = measure.number(interval.mean, sign)
    if interval.half_width is None:
        return mean
    return f"{mean} ± {measure.number(interval.half_width)}"


def _difference(measure: Measure, interval: Interval | None) -> str:
    shown = _shown(measure, interval, "+")
    return f"{shown} ({_pairs(interval.n)})" if interval else shown


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def _rounded(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _warnings(group: Group) -> list[str]:
    """Return warnings about runs that cannot be compared."""
    texts = Counter(
        run.text_sha256
        for arm in group.arms
        for run in group.finished(arm).values()
        if run.text_sha256
    )
    if len(texts) < 2:
        return []
    short = Counter({digest[:12]: count for digest, count in texts.items()})
    return [
        f"**Warning: the runs have different texts**, by SHA-256: {_counted(short)}. Their losses "
        "cannot be compared: train all arms on one text (data.path).\n"
    ]


def _not_averaged(group: Group) -> list[str]:
    lines = []
    for arm, runs in group.arms.items():
        for seed in group.seeds:
            if reason := _reason(runs.get(seed)):
                lines.append(f"{arm}, seed {seed}: {reason}")
    for run in group.left_out:
        kept = group.arms[run.arm][run.seed]
        lines.append(
            f"{run.arm}, seed {run.seed}: a second run, {run.name} ({run.status}), "
            f"left out for {kept.name}; if both are intended, compare them separately"
        )
    return lines


def _reason(run: Run | None) -> str:
    """Return why a run is not averaged; empty if it is."""
    if run is None:
        return "missing: another arm has this seed, this arm has no run with it"
    if run.status in ("failed", "diverged"):
        error = " ".join(run.error.split())[:300] or "no error given"
        return f"{run.status}: {error} ({run.name})"
    if not run.finished:
        return f'unfinished: its status is "{run.status}" ({run.name})'
    found = run.test_score is not None
    return "" if found else f"finished, but no test {run.measure.name} ({run.name})"


def _provenance(group: Group) -> list[str]:
    """Return hardware, versions, epochs and dates of the finished runs, and how they differ."""
    runs = [run for arm in group.arms for run in group.finished(arm).values()]
    if not runs:
        return ["no finished run, so no hardware, versions, epochs or dates to state"]
    hardware = Counter(run.hardware for run in runs)
    line = f"hardware: {_counted(hardware)}"
    if len(hardware) > 1:
        line += ". It differs: speed ratios come from pairs on the same hardware only"
    lines = [line]
    names = sorted({name for run in runs for name in run.versions})
    versions = {name: Counter(run.versions.get(name, "none") for run in runs) for name in names}
    same = [f"{name} {next(iter(found))}" for name, found in versions.items() if len(found) == 1]
    lines.append(f"versions: {', '.join(same) or 'none that all runs share'}")
    lines += [
        f"version differs: {name} {_counted(found)}"
        for name, found in versions.items()
        if len(found) > 1
    ]
    epochs = Counter(str(run.epochs) for run in runs)
    lines.append(f"epochs{' differ' * (len(epochs) > 1)}: {_counted(epochs)}")
    if rates := _rates(group):
        lines.append(f"learning rate{' differs' * (len(rates) > 1)}: {_by_arm(rates)}")
    days = sorted({run.date[:10] or "unknown" for run in runs})
    lines.append(f"dates: {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}")
    return lines


def _rates(group: Group) -> dict[float, list[str]]:
    """Return learning rate -> arms with finished runs at that rate."""
    rates: dict[float, list[str]] = {}
    for arm in group.arms:
        for rate in sorted({run.learning_rate or 0.0 for run in group.finished(arm).values()}):
            if rate:
                rates.setdefault(rate, []).append(arm)
    return rates


def _by_arm(rates: Mapping[float, Sequence[str]]) -> str:
    if len(rates) == 1:
        return f"{next(iter(rates)):g}"
    return ", ".join(f"{rate:g} ({', '.join(arms)})" for rate, arms in sorted(rates.items()))


def _counted(found: Counter[str]) -> str:
    if len(found) == 1:
        return next(iter(found))
    ordered = found.most_common()
    return ", ".join(f"{name} ({count} run{'s' * (count > 1)})" for name, count in ordered)


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
