"""The tables of the study, computed again from the runs in docs/results."""

import re
from pathlib import Path

import pytest
from scipy import stats

from normplug.compare import compare
from normplug.compare.report import p_text

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "study.md"
README = DOCS.parent / "README.md"
MEANS = {"over_rates": True}
REPORTS = {
    "e1": (("e1_h100",), {"reference": "standard gamma0=0.786", "margin": 0.2} | MEANS),
    "e2": (("e2_h100",), {"reference": "0.25", "margin": 0.2}),
    "e2_standard": (("e2_h100",), {"reference": "standard"}),
    "e3": (("e3_h100",), {"reference": "standard", "margin": 0.2}),
    ".": (("depth_h100", "depth_small_cpu", "targets_h100"), {}),
}
RUNS = {"E1": "e1_h100", "E2": "e2_h100", "E3": "e3_h100", "ViT": "targets_h100"}
RUNS |= {"GPT 24": "depth_h100 depth_other_rates_h100", "GPT 12": "depth_small_cpu"}
MODELS = {"ViT": "vit_tiny", "GPT 24": "gpt_24x256", "GPT 12": "gpt_tiny"}
ARMS = {
    "bias_4": "standard-bias_4",
    "bias_16": "standard-bias_16",
    "head": "standard-head",
    "bias_and_head": "standard-bias_and_head",
    "small_weights": "standard-gamma0_0.1-slow_weights",
}
PRIMARY = ("E1: golden, from its start", "E2: bias_and_head, from 0.25", "E3: 0.25")
STARTS = {"its start": "standard gamma0=0.786", "0.25": "0.25"}


def compared(names, out, **options):
    sources = [DOCS / f"results/{name}.json" for name in names]
    return compare(*sources, out=out, **options)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_what_its_runs_give(name, tmp_path):
    names, options = REPORTS[name]
    markdown = compared(names, tmp_path, **options).markdown
    page = DOCS / "study" / name / "summary.md"
    tables = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert tables == [line for line in markdown.splitlines() if line.startswith("|")]


def rows_of_the_page():
    text = PAGE.read_text().split("## The table")[1].split("The mean is")[0]
    lines = [line for line in text.splitlines() if re.match(r"\| (E\d|ViT|GPT)", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("cells", rows_of_the_page(), ids=lambda cells: cells[0])
def test_a_row_of_the_study_is_what_its_runs_give(cells, tmp_path):
    study, arm = cells[0].split(": ")
    arm, _, start = arm.partition(", from ")
    options = {"reference": STARTS.get(start, "standard")}
    options |= MEANS if study == "E1" else {}
    options |= {"rate": 0.0017} if study == "GPT 24" else {}
    table = compared(RUNS[study].split(), tmp_path, **options).table
    table = table[table.model == MODELS.get(study, "resnet18")].set_index("arm")
    row = table.loc[ARMS.get(arm, arm)]
    scale, digits = (1, 4) if study.startswith("GPT") else (100, 2)

    def interval(name, sign):
        mean = row[f"{name}_mean"] * scale
        half_width = row[f"{name}_t95_half_width"] * scale
        return f"{mean:{sign}.{digits}f} ± {half_width:.{digits}f}"

    difference = interval("difference_to_reference", "+")
    assert cells[:4] == [cells[0], str(row.n_finished), interval("test", ""), difference]
    assert cells[5] == str(row.n_diverged)
    if cells[0] in PRIMARY:
        assert cells[4] == p_text(p_of_one_test(row))
    elif study != "E1":
        # E1's five secondary contrasts are adjusted together, in the appendix.
        assert cells[4] == p_text(row.difference_to_reference_p_holm)


def p_of_one_test(row):
    """The p of the paired t-test, not adjusted, from the interval."""
    freedom = row.difference_to_reference_n - 1
    error = row.difference_to_reference_t95_half_width / stats.t.ppf(0.975, freedom)
    return 2 * stats.t.sf(abs(row.difference_to_reference_mean) / error, freedom)


def test_readme_has_the_differences_of_the_study():
    text = " ".join(README.read_text().split())
    differences = {cells[0]: cells[3] for cells in rows_of_the_page()}
    assert f"12 epochs ({differences['E1: golden']} points, a 95%" in text
    assert (
        f"After 60 epochs no difference was found ({differences['E3: golden']})" in text
    )
    mean, half_width = differences["GPT 24: golden"].split(" ± ")
    worse = f"({float(mean):+.3f} ± {float(half_width):.3f} nats per byte)"
    assert f"Golden was worse in a GPT of 24 blocks {worse}" in text
    # Which effects are found: the interval leaves 0 out.
    found = {}
    for name, cell in differences.items():
        mean, half_width = cell.split(" ± ")
        found[name] = abs(float(mean)) > float(half_width)
    clear = {name for name in found if name.endswith(": golden") and found[name]}
    assert clear == {"E1: golden", "GPT 24: golden"}
    assert not found["E1: golden, from its start"]
