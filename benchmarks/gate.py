"""Fail where normplug has become slower than committed rows say.

    arms="eager compile swap swap+fuse swap+fuse+compile"
    python benchmarks/models.py --rows gpt2 --arms $arms --json new.json    # three times
    python benchmarks/gate.py new.json --rows gpt2 --against docs/results/steps_h200.json

It compares the speed over eager of the same run, so the clock of the card matters little. Of
several runs, the median counts. Committed rows with a layout need `--layout` in the runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas

import tables
from normplug.bench.rows import read_file

LOSS = 0.05  # of the committed speed over eager
RUNS = 3  # fewer say too little


def speeds(path: Path, models: Sequence[str] | None) -> pandas.DataFrame:
    """The speed over eager of each case and arm of normplug: the median, and of how many runs."""
    found = pandas.DataFrame(read_file(path))
    if "over_eager" not in found:
        raise SystemExit(
            f"{path} has no speeds over eager: measure the arm eager in the same run."
        )
    series = "arm" if "arm" in found else "provider"
    found = found[found[series].str.contains("swap|normplug")]
    if models is not None:
        found = found[found["model"].isin(models)]
    case = list(tables.CASE)
    found = found.reindex(columns=[*case, series, "over_eager"])
    found[case] = found[case].astype(object).fillna("")  # such as the layout of a text
    grouped = found.groupby([*case, series], sort=False)["over_eager"]
    return grouped.agg(speed="median", runs="count")


def compare(new: pandas.DataFrame, old: pandas.DataFrame) -> pandas.DataFrame:
    """The committed rows next to the new ones, and why a row fails; "" where it passes."""
    rows = old[["speed"]].rename(columns={"speed": "committed"}).join(new)
    rows["runs"] = rows["runs"].fillna(0).astype(int)
    rows["change"] = rows["speed"] / rows["committed"] - 1
    rows["fails"] = ""
    rows.loc[rows["change"] < -LOSS, "fails"] = f"slower by more than {LOSS:.0%}"
    rows.loc[rows["runs"] < RUNS, "fails"] = f"fewer than {RUNS} runs"
    rows.loc[rows["runs"] == 0, "fails"] = "not measured"
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "results", type=Path, help="rows of several runs of models.py or norms.py"
    )
    parser.add_argument("--against", type=Path, required=True, help="the committed rows")
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="compare these models only"
    )
    a = parser.parse_args(argv)
    committed = speeds(a.against, a.rows)
    if committed.empty:
        raise SystemExit(f"{a.against} has no rows of normplug to compare with.")
    rows = compare(speeds(a.results, a.rows), committed)
    levels = rows.index.to_frame()
    unused = [name for name in levels if (levels[name] == "").all()]
    print(rows.droplevel(unused).to_string(float_format="{:.3f}".format))
    failed = rows.loc[rows["fails"] != "", "fails"]
    if len(failed):
        named = [
            f"{', '.join(str(part) for part in case if part != '')}: {why}"
            for case, why in failed.items()
        ]
        sys.exit("\n".join([f"{len(failed)} of {len(rows)} rows fail:", *named]))


if __name__ == "__main__":
    main()
