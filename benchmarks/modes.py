"""Write the table and the picture of modes in docs/experiments.md from a summary.csv of train.py.

python benchmarks/modes.py logs/sweeps/modes/summary.csv
python benchmarks/modes.py                               # from the committed docs/results/modes.csv
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pandas as pd

from normplug._files import write_file
from normplug._pictures import save
from normplug.compare.plots import speeds_figure
from normplug.experiment.speed import report

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "experiments.md"
RESULTS = DOCS / "results/modes.csv"
BLOCK = re.compile(r"(?<=<!-- modes: start -->\n).*?(?=<!-- modes: end -->)", re.DOTALL)
LINKS = """
![Test accuracy of each mode over its speed, with intervals](modes.png)

{report}
[Results](results/modes.csv).

"""


def filled(page: str, table: pd.DataFrame) -> str:
    """The text of docs/experiments.md, with the report of a table between its marks."""
    text = LINKS.format(report=report(table))
    return BLOCK.sub(lambda _: text, page)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    file = parser.parse_args().file
    if file != RESULTS:
        shutil.copyfile(file, RESULTS)
    table = pd.read_csv(RESULTS)
    write_file(PAGE, filled(PAGE.read_text(), table))
    figure = speeds_figure(table)
    assert figure is not None, "a picture needs two modes"
    save(figure, DOCS / "modes.png")


if __name__ == "__main__":
    main()
