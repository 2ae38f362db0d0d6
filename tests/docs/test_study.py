"""The tables of the study, computed again from the runs in docs/results."""

import json
import re
from pathlib import Path
from statistics import median

import pytest
from scipy import stats

from normplug.compare import compare
from normplug.compare.report import p_text

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "study.md"
APPENDIX = DOCS / "study/appendix.md"
README = DOCS.parent / "README.md"
MEANS = {"over_rates": True}
REPORTS = {
    "e1": (("e1_h100",), {"reference": "standard gamma0=0.786", "margin": 0.2} | MEANS),
    "e2": (("e2_h100",), {"reference": "0.25", "margin": 0.2}),
    "e2_standard": (("e2_h100",), {"reference": "standard"}),
    "e3": (("e3_h100",), {"reference": "standard", "margin": 0.2}),
    "e4": (("e4_h200",), {"reference": "standard", "margin": 0.2} | MEANS),
    "e5": (("e5_h200",), {"reference": "standard", "margin": 0.02} | MEANS),
    "e6": (("e6_h200",), {"reference": "standard", "margin": 0.2}),
    "e6_equal": (("e6_h200",), {"reference": "standard-golden_equal", "margin": 0.2}),
    "e7": (("e7_h200",), {"reference": "standard", "margin": 0.2}),
    ".": (("depth_h100", "depth_small_cpu", "targets_h100"), {}),
}
RUNS = {"E1": "e1_h100", "E2": "e2_h100", "E3": "e3_h100"}
RUNS |= {f"E{number}": f"e{number}_h200" for number in (4, 5, 6, 7)}
RUNS |= {"GPT 12": "depth_small_cpu"}
MODELS = {"E4": "vit_tiny"}
MODELS |= {"E5": "gpt_24x256", "GPT 12": "gpt_tiny"}
START = "standard-gamma0_0.786"
ARMS = {
    "its start": START,
    "bias_4": "standard-bias_4",
    "bias_16": "standard-bias_16",
    "head": "standard-head",
    "bias_and_head": "standard-bias_and_head",
    "golden_equal": "standard-golden_equal",
}
PRIMARY = ("E1: golden, from its start", "E2: bias_and_head, from 0.25", "E3: 0.25")
PRIMARY += ("E6: golden", "E6: golden, from golden_equal", "E7: 0.25")
STARTS = {"its start": START, "0.25": "0.25"}
STARTS |= {"golden_equal": "standard-golden_equal"}
# The learning rates and the contrasts that a plan names, its primary contrast first.
PLANNED = {
    "E1": ((0.4, 0.8), (("golden", START), ("golden", "standard"))),
    "E4": (
        (0.001, 0.002),
        (("0.5", "standard"), ("golden", START), ("golden", "standard")),
    ),
    "E5": (
        (0.0012, 0.0017, 0.0024),
        (("golden", "standard"), ("golden", START), (START, "standard")),
    ),
}


def results(name):
    return (DOCS / f"results/{name}.json").read_text()


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
    options |= MEANS if study in PLANNED else {}
    table = compared([RUNS[study]], tmp_path, **options).table
    table = table[table.model == MODELS.get(study, "resnet18")].set_index("arm")
    row = table.loc[ARMS.get(arm, arm)]
    mean = interval(row, "test", study)
    difference = interval(row, "difference_to_reference", study, sign="+")
    assert cells[:4] == [cells[0], str(row.n_finished), mean, difference]
    assert cells[5] == str(row.n_diverged)
    if cells[0] in PRIMARY:
        assert cells[4] == p_text(p_of_one_test(row))
    elif study in PLANNED:
        planned = planned_contrasts(study, tmp_path)
        contrast = ARMS.get(arm, arm), options["reference"], "mean"
        assert cells[4] == planned[contrast][1]
    else:
        assert cells[4] == p_text(row.difference_to_reference_p_holm)


def interval(row, name, study, sign=""):
    """A mean and half of its interval, as the study shows them: accuracies in percent."""
    is_loss = study == "E5" or study.startswith("GPT")
    scale, digits = (1, 4) if is_loss else (100, 2)
    mean = scale * row[f"{name}_mean"]
    half_width = scale * row[f"{name}_t95_half_width"]
    return f"{mean:{sign}.{digits}f} ± {half_width:.{digits}f}"


def p_of_one_test(row):
    """The p of the paired t-test, not adjusted, from the interval."""
    freedom = row.difference_to_reference_n - 1
    error = row.difference_to_reference_t95_half_width / stats.t.ppf(0.975, freedom)
    return 2 * stats.t.sf(abs(row.difference_to_reference_mean) / error, freedom)


def planned_contrasts(study, out):
    """(arm, reference, rate or "mean") -> the difference and its p, as a table shows them.

    The p of the primary contrast, the first, is not adjusted. The others are, together.
    """
    rates, contrasts = PLANNED[study]
    texts, ps = {}, {}
    for arm, reference in contrasts:
        for rate in ("mean", *rates):
            options = MEANS if rate == "mean" else {"rate": rate}
            table = compared([RUNS[study]], out, reference=reference, **options).table
            row = table.set_index("arm").loc[arm]
            key = arm, reference, rate
            texts[key] = interval(row, "difference_to_reference", study, sign="+")
            ps[key] = p_of_one_test(row)
    (primary, p), *others = ps.items()
    adjusted = {primary: p}
    # Holm's method: the least p counts as often as there are tests, the next one time less.
    highest = 0.0
    for rank, (key, p) in enumerate(sorted(others, key=lambda each: each[1])):
        highest = max(highest, min(1.0, p * (len(others) - rank)))
        adjusted[key] = highest
    return {key: (texts[key], p_text(adjusted[key])) for key in texts}


@pytest.mark.parametrize("study", PLANNED)
def test_the_appendix_has_the_contrasts_of_a_plan_at_each_rate(study, tmp_path):
    rates, contrasts = PLANNED[study]
    planned = planned_contrasts(study, tmp_path)
    names = {START: "its start"}
    for arm, reference in contrasts:
        cells = [f"{names.get(arm, arm)} minus {names.get(reference, reference)}"]
        for rate in ("mean", *rates):
            cells += planned[arm, reference, rate]
        assert f"| {' | '.join(cells)} |" in APPENDIX.read_text()


def test_the_first_lines_have_the_differences_of_the_table():
    text = " ".join(PAGE.read_text().split("## What")[0].split())
    differences = {cells[0]: cells[3] for cells in rows_of_the_page()}
    for name, digits, words in [
        ("E6: golden", 2, "better than `standard` by {} ± {} points (20 fresh seeds)"),
        ("E6: 0.5", 2, "a larger difference from `standard` (+{} ± {})"),
        ("E2: bias_16", 2, "rate the largest (+{} ± {}, seeds not fresh)"),
        ("E3: golden", 2, "no difference of golden was found at 0.4 (+{} ± {})"),
        ("E5: golden", 3, "worse than `standard` by {} ± {} nats per byte (p 0.003)"),
        ("E5: its start", 3, "and its start by {} ± {} (p 0.014)"),
        ("E4: 0.5", 2, "0.5 minus `standard` is +{} ± {} points (inconclusive)"),
        ("E4: golden", 2, "golden minus `standard` +{} ± {} (p 0.085)"),
    ]:
        mean, half_width = map(float, differences[name].split(" ± "))
        shown = words.format(f"{abs(mean):.{digits}f}", f"{half_width:.{digits}f}")
        assert shown in text, name
    assert text.startswith(
        "# Does a target variance help? In a ResNet-18 of 12 epochs, golden"
    )


@pytest.mark.parametrize(
    ("report", "arm", "words"),
    [
        ("e1", "golden", "equivalent within 0.2 points (TOST: p {})."),
        (
            "e2",
            "standard-bias_and_head",
            "equivalent to a target of 0.25 within 0.2 points (TOST: p {}).",
        ),
        ("e3", "0.25", "equivalence was not shown (E3, TOST: p {})"),
        (
            "e4_start",
            "golden",
            "equivalent to its start within 0.2 points (TOST: p {})",
        ),
        (
            "e5_start",
            "golden",
            "equivalent to its start within 0.02 nats per byte (TOST: p {}, four pairs)",
        ),
        ("e6_equal", "golden", "within 0.2 points was just missed (TOST: p {})"),
        ("e7", "0.25", "equivalent to `standard` within 0.2 points (TOST: p {})"),
    ],
)
def test_the_study_says_how_equivalent_arms_are(report, arm, words, tmp_path):
    report, of_start, _ = report.partition("_start")
    names, options = REPORTS[report]
    options = options | {"reference": START} if of_start else options
    table = compared(names, tmp_path, **options).table.set_index("arm")
    p = table.loc[arm].difference_to_reference_p_equivalent
    assert (p < 0.05) == words.startswith("equivalent ")
    text = " ".join(PAGE.read_text().split())
    assert words.format(p_text(p)) in text


def scores_of(name, arm, rate=0.8):
    """Seed -> the scores of the ResNet-18 runs of an arm in a file of results."""
    runs = json.loads(results(name))
    return {
        run["seed"]: (100 * run["test_accuracy"], run["accuracy_by_epoch"])
        for run in runs
        if (run["model"], run["arm"], run["learning_rate"]) == ("resnet18", arm, rate)
    }


def differences_of(name, arm):
    """The differences of an arm from `standard` in test accuracy, by seed."""
    scores, standard = scores_of(name, arm), scores_of(name, "standard")
    assert scores.keys() == standard.keys() == {*range(1, 11)}
    return [scores[seed][0] - standard[seed][0] for seed in sorted(scores)]


@pytest.mark.parametrize(
    ("name", "arm", "words"),
    [("e1_h100", "golden", "for golden (E1"), ("e2_h100", "0.25", "for 0.25 (E2")],
)
def test_the_study_says_how_far_its_samples_are_those_of_the_runs_before(
    name, arm, words
):
    before = differences_of("targets_h100", arm)
    correlation = stats.pearsonr(differences_of(name, arm), before).statistic
    assert f"by {correlation:.3f} {words}" in " ".join(PAGE.read_text().split())


def test_one_sample_of_standard_stands_in_three_results():
    standard = scores_of("e1_h100", "standard")
    assert scores_of("e2_h100", "standard") == standard
    for arm in ("standard", "golden"):
        speeds = scores_of("study_speed_h100", arm)
        assert speeds.keys() == {*range(1, 6)}
        assert speeds.items() <= scores_of("e1_h100", arm).items()


def test_the_study_has_the_variances_of_the_residual_stream():
    found = {}
    names = ("depth_h100", "depth_other_rates_h100", "depth_rates_h100")
    for run in (run for name in names for run in json.loads(results(name))):
        if "variances" in run and (run["seed"] > 0 or run["learning_rate"] == 0.01):
            variance = run["variances"]["input_variance"][-1][-1]  # of the last norm
            found.setdefault((run["arm"], run["learning_rate"]), []).append(variance)
    text = " ".join(APPENDIX.read_text().split())
    small, middle, large = (
        [found[arm, rate] for arm in ("golden", "standard")]
        for rate in (0.0017, 0.003, 0.01)
    )
    assert [len(each) for each in (*small, *middle, *large)] == [4, 4, 4, 4, 1, 1]
    golden, standard = (round(median(each)) for each in small)
    assert f"is {golden} with golden and {standard} with `standard` at a rate" in text
    golden, standard = (round(median(each)) for each in middle)
    assert f"and {golden} and {standard} at 0.003 (medians over four seeds)" in text
    golden, standard = (each[0] / 1e6 for each in large)
    assert f"with one seed, it is {golden:.1f} and {standard:.1f} million" in text


def test_readme_has_the_differences_of_the_study():
    text = " ".join(README.read_text().split())
    differences = {cells[0]: cells[3] for cells in rows_of_the_page()}
    assert (
        f"12 epochs at a rate of 0.8 ({differences['E6: golden']} points, a 95%" in text
    )
    assert (
        f"In 60 epochs at 0.4 no difference was found ({differences['E3: golden']})"
        in text
    )
    mean, half_width = differences["E5: golden"].split(" ± ")
    worse = f"({float(mean):+.3f} ± {float(half_width):.3f} nats per byte)"
    assert f"Golden was worse in a GPT of 24 blocks {worse}" in text
    # In which networks golden differs from `standard`, and from its start.
    ps = {cells[0]: cells[4].replace("< ", "") for cells in rows_of_the_page()}
    found = {name for name, p in ps.items() if float(p) < 0.05}
    clear = {name for name in found if name.endswith(": golden")}
    assert clear == {"E1: golden", "E5: golden", "E6: golden"}
    assert not {name for name in found if name.endswith("from its start")}
