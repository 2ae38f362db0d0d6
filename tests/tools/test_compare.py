"""The comparison of runs: what is averaged, what is only listed, and what is written."""

import pytest

pytest.importorskip("normplug.compare")

import json
import math
from functools import partial
from itertools import product

import pandas as pd

from normplug.compare import compare
from normplug.compare.__main__ import main
from programs import ROOT


def write_run(root, arm, seed, **changes):
    record = {
        "arm": arm,
        "seed": seed,
        "model": "resnet18",
        "data": "digits",
        "test_accuracy": 0.9,
        "accuracy_by_epoch": [0.5, 0.7, 0.8, 0.9],
        "epochs": 4,
        "step_ms": 10.0,
        "images_per_s": 1000.0,
        "peak_memory_bytes": 512 * 2**20,
        "norms_swapped": 20,
        "versions": {"torch": "2.9.0"},
        "hardware": "H100",
        "date": "2026-06-01T12:00:00",
        "status": "finished",
        **changes,
    }
    directory = root / str(record["model"]) / arm / f"seed_{seed}_{record['date'][:10]}"
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps(record))
    return directory


def write_runs(root, values, key="test_accuracy", **changes):
    """Write a run for each value: arm -> its values of `key`, by seed."""
    for arm, of_arm in values.items():
        for seed, value in enumerate(of_arm):
            write_run(root, arm, seed, **changes, **{key: value})


def a_loss(loss, **others):
    """What a run with a loss records in place of an accuracy."""
    measure = {"name": "loss", "unit": "nats/byte", "better": "lower", "items": "tokens"}
    values = {"test_loss": loss, "loss_by_epoch": [2.0, loss], "tokens_per_s": 10.0}
    return {"measure": measure, **values, **others}


def write_variance(run, steps=30, norms=3):
    """Write `variance.csv`: the input variance is the step, times the number of the norm."""
    lines = ["step,depth,target_variance,input_variance,output_variance,affine_variance"]
    lines += [
        f"{s},{n},1.0,{s * (n + 1)},1.0,nan" for s in range(steps) for n in range(norms)
    ]
    (run / "variance.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def compared(tmp_path):
    """Compare the runs in `tmp_path`."""
    return partial(compare, tmp_path)


def by_arm(comparison):
    return {row.arm: row for row in comparison.table.itertuples()}


def lines_of(comparison):
    """The lines of the report, without the padding of its tables."""
    return [" ".join(line.split()) for line in comparison.markdown.splitlines()]


def difference(row, what="difference_to_reference"):
    """(n, mean, half width) of an interval of the table."""
    return tuple(
        getattr(row, f"{what}_{part}") for part in ("n", "mean", "t95_half_width")
    )


def test_differences_are_paired_by_seed_for_the_test_and_the_validation(
    compared, tmp_path
):
    values = {
        "standard": {0: (0.90, 0.8), 1: (0.92, 0.7), 2: (0.94, None), 4: (0.9, 0.9)},
        "golden": {0: (0.92, 0.81), 1: (0.92, 0.73), 3: (0.50, 0.9), 4: (None, math.nan)},
    }
    for arm, of_arm in values.items():
        for seed, (test, last) in of_arm.items():
            write_run(
                tmp_path, arm, seed, test_accuracy=test, accuracy_by_epoch=[0.1, last]
            )
    comparison = compared()
    row = by_arm(comparison)["golden"]
    # Differences 0.02 and 0, and 1 and 3 points: t(0.975, 1) = 12.7062 times s / sqrt(2).
    assert difference(row) == pytest.approx((2, 0.01, 0.127062), rel=1e-5)
    last = difference(row, "validation_difference_to_reference")
    assert last == pytest.approx((2, 0.02, 0.127062), rel=1e-5)
    line = next(
        line for line in comparison.markdown.splitlines() if line.startswith("| golden")
    )
    assert line.endswith(" +2.00 ± 12.71 (2 pairs) |")
    assert "golden, seed 4: finished: no test accuracy (" in comparison.markdown


def test_runs_with_a_loss_are_compared_in_its_unit_beside_runs_with_an_accuracy(
    compared, tmp_path
):
    for arm, loss in {"standard": 1.5, "baseline": 1.75, "golden": 1.25}.items():
        for seed, text in enumerate("ab"):
            bits = {"test_bits_per_character": 2.25 + seed, "text_sha256": 20 * text}
            write_run(
                tmp_path, arm, seed, **a_loss(loss, model="gpt", data="text", **bits)
            )
            write_run(tmp_path, arm, seed)
    comparison = compared()
    order = ["standard", "golden", "baseline"]  # lower is better
    assert list(comparison.table.arm)[:3] == order
    rows = {(row.model, row.arm): row for row in comparison.table.itertuples()}
    assert difference(rows["gpt", "golden"]) == (2, -0.25, 0)
    text, digits = comparison.markdown.split("## resnet18 on digits")
    for words in (
        "**Warning: the runs have different texts, so their losses cannot be compared**",
        "aaaaaaaaaaaa (3 runs), bbbbbbbbbbbb (3 runs).",
        " test loss, nats/byte |",
        " bits per character |",
        " 2.7500 ± 6.3531 |",
        " minus standard, nats/byte |",
        " -0.2500 ± 0.0000 (2 pairs) |",
        "Test loss is on the test set, after the last epoch; lower is better.",
        " tokens/s |",
    ):
        assert words in text
    assert " test accuracy, % |" in digits
    units = pd.read_csv(tmp_path / "summary.csv").groupby("model").unit.unique()
    assert units.map(list).to_dict() == {"gpt": ["nats/byte"], "resnet18": ["%"]}


def write_gains(root, gains):
    """Write a run for each gain, in points over an accuracy of 50%: arm -> gains by seed."""
    write_runs(
        root, {arm: [(50 + g) / 100 for g in seeds] for arm, seeds in gains.items()}
    )


def test_p_is_that_of_a_paired_t_test_and_adjusted_for_the_number_of_arms(
    compared, tmp_path
):
    # Differences of 1, 2 and 3 points: t = 2 / (1 / sqrt(3)), and p = 0.0742 with 2 degrees.
    # Twice the differences have the same t; Holm's adjustment keeps the order of the ps.
    gains = {"golden": (1, 2, 3), "0.25": (2, 4, 6), "0.5": (1, 1, 1), "2.0": (0, 0, 0)}
    write_gains(tmp_path, gains | {"1.5": (-1, 0, 1), "standard": (0, 0, 0)})
    comparison = compared()
    rows = by_arm(comparison)
    ps = {arm: row.difference_to_reference_p_holm for arm, row in rows.items()}
    assert math.isnan(ps["standard"])
    assert ps["golden"] == ps["0.25"] == pytest.approx(4 * 0.0741799, rel=1e-5)
    assert ps["0.5"] == pytest.approx(0, abs=1e-12)
    assert ps["1.5"] == ps["2.0"] == 1
    assert "+2.00 ± 2.48 (3 pairs) |      0.297 |" in comparison.markdown


def test_a_collected_file_gives_the_same_report_without_what_is_local(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(2):
        local = {
            "process": "5 on a-machine",
            "overrides": ["data.root=/home/me/photos", "seed=0"],
        }
        write_variance(write_run(runs, "golden", seed, **local))
    write_run(runs, "golden", 2, status="failed", error="no\n/home/me/data.bin here")
    file = tmp_path / "docs" / "runs.json"
    assert main([str(runs), "--collect", str(file)]) == 0
    text = file.read_text()
    assert len(text.splitlines()) == 2 + 3
    assert not any(local in text for local in ("process", "a-machine", "/home"))
    assert '"data.root=photos"' in text
    # The last step.
    assert json.loads(text)[0]["variances"]["input_variance"] == [[29, 58, 87]]
    found = compare(runs, out=tmp_path / "a", plots=True)
    kept = compare(file, out=tmp_path / "b", plots=True)
    _, *lines = found.markdown.replace("/home/me/", "").splitlines()
    assert kept.markdown.splitlines()[1:] == lines
    assert [path.name for path in kept.paths] == [path.name for path in found.paths]
    assert kept.paths[-1].name == "variance_by_depth_resnet18_digits.png"
    with pytest.raises(ValueError, match=r"Name it: --out DIR\."):
        compare(file)


def test_a_collected_file_has_the_runs_of_two_sources_that_have_one_name(tmp_path):
    sources = [tmp_path / data for data in ("digits", "fake")]
    for source in sources:
        write_run(source, "golden", 0, data=source.name)
    file = tmp_path / "runs.json"
    assert main([*map(str, sources), "--collect", str(file)]) == 0
    assert list(compare(file, out=tmp_path / "out").table.data) == ["digits", "fake"]


def test_each_arm_gets_its_best_rate_by_one_rule(compared, tmp_path, capsys):
    last = {
        "golden": {0.1: 0.7, 0.2: 0.8, 0.4: 0.75},
        "standard": {0.1: 0.9, 0.2: 0.9, 0.4: 0.95},
        "0.5": {0.1: 0.5},
    }
    for arm, rates in last.items():
        for seed, (rate, value) in product((0, 1), rates.items()):
            options = [f"mode={arm}", "tag=a b", f"optimizer.lr={rate}"]
            options += [f"seed={seed}", "study=s"]
            run = {"accuracy_by_epoch": [0.99, value], "learning_rate": rate}
            if (arm, rate, seed) == ("standard", 0.4, 1):
                run["status"] = "failed"
            write_run(tmp_path / str(rate), arm, seed, overrides=options, **run)
    best = tmp_path / "best.txt"
    assert main([str(tmp_path), "--best", str(best)]) == 0
    assert best.read_text().splitlines() == [
        "mode=0.5 'tag=a b' optimizer.lr=0.1",
        "mode=golden 'tag=a b' optimizer.lr=0.2",
        "mode=standard 'tag=a b' optimizer.lr=0.1",
    ]
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("| standard"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    end = "at the end of the range: extend it"
    assert cells == ["90.00", "90.00", "-", "0.1", "0.00", end]
    assert "has the best mean validation accuracy after the last epoch" in printed
    # Without a choice, each rate is an arm.
    assert {"golden lr=0.1", "golden lr=0.2", "golden lr=0.4", "0.5"} < set(
        compared().table.arm
    )


def test_a_margin_adds_the_p_of_an_equivalence(compared, tmp_path, capsys):
    # Differences of -0.1, 0 and 0.1 points: t = 0.2 / (0.1 / sqrt(3)), and one-sided p = 0.0371.
    gains = {"standard": (0, 0, 0), "golden": (-0.1, 0, 0.1)}
    write_gains(tmp_path, gains | {"0.5": (1, 1.1, 1.2), "1.5": (-1, -1.1, -1.2)})
    rows = by_arm(compared(margin=0.2))
    ps = {arm: row.difference_to_reference_p_equivalent for arm, row in rows.items()}
    assert ps["golden"] == pytest.approx(0.0370908, rel=1e-4)
    assert min(ps["0.5"], ps["1.5"]) > 0.99
    assert math.isnan(ps["standard"])
    assert main([str(tmp_path), "--margin", "0.2"]) == 0
    assert " p (TOST, within ± 0.2 points) |" in capsys.readouterr().out
    assert "TOST" not in compared().markdown


def write_two_rates(root, values, **changes):
    """Write a run for each value: arm -> rate -> its test accuracies by seed."""
    for arm, rates in values.items():
        for rate, of_rate in rates.items():
            for seed, accuracy in enumerate(of_rate):
                scores = {"test_accuracy": accuracy, "accuracy_by_epoch": [accuracy]}
                write_run(
                    root / str(rate), arm, seed, learning_rate=rate, **scores, **changes
                )


def test_arms_are_compared_by_their_means_over_rates(compared, tmp_path):
    golden = {0.4: [0.81, 0.82], 0.8: [0.83, 0.86]}
    write_two_rates(
        tmp_path, {"golden": golden, "standard": {0.4: [0.8] * 3, 0.8: [0.8] * 3}}
    )
    write_run(tmp_path / "0.4", "golden", 2, learning_rate=0.4)
    comparison = compared(over_rates=True)
    for words in (
        "# Comparison of 11 runs in ",
        "## resnet18 on digits: means over the learning rates 0.4, 0.8",
        "- learning rate 0.8: golden, standard",
    ):
        assert words in comparison.markdown
    assert list(comparison.table.arm) == ["standard", "golden"]
    row = by_arm(comparison)["golden"]
    assert difference(row)[:2] == pytest.approx((2, (0.02 + 0.04) / 2))
    lacking = "golden, seed 2: unfinished: another learning rate has no finished run ("
    assert lacking in comparison.markdown
    assert not comparison.complete


def test_the_runs_of_one_rate_are_compared_alone(compared, tmp_path):
    rates = {"golden": {0.4: [0.81], 0.8: [0.86]}, "standard": {0.4: [0.82], 0.8: [0.83]}}
    write_two_rates(tmp_path, rates)
    comparison = compared(reference="golden", rate=0.8)
    assert difference(by_arm(comparison)["standard"])[:2] == pytest.approx((1, -0.03))
    with pytest.raises(
        ValueError, match=r"no run has the learning rate 3, only \[0.4, 0.8\]"
    ):
        compared(rate=3.0)


def test_a_column_without_a_value_is_left_out(compared, tmp_path):
    write_runs(
        tmp_path, {"golden": [0.9], "standard": [0.8]}, images_per_s=None, step_ms=None
    )
    lines = lines_of(compared())
    assert "| arm | peak, MiB | norms swapped |" in lines
    assert "| arm | n | test accuracy, % | minus standard, points |" in " ".join(lines)


def test_the_report_has_the_sensitivity_to_the_rate_and_flags_ends(compared, tmp_path):
    rates = {0.2: [0.7], 0.4: [0.9], 0.8: [0.8]}
    write_two_rates(tmp_path, {"golden": rates, "standard": {0.4: [0.8], 0.8: [0.9]}})
    for arm in ("golden", "0.5"):
        write_run(tmp_path / "1.6", arm, 0, learning_rate=1.6, status="diverged")
    lines = lines_of(compared())
    assert "| arm | 0.2 | 0.4 | 0.8 | 1.6 | best | sensitivity | remark |" in lines
    assert "| golden | 70.00 | 90.00 | 80.00 | diverged | 0.4 | 10.00 | - |" in lines
    end = "at the end of the range: extend it"
    assert f"| standard | - | 80.00 | 90.00 | - | 0.8 | 5.00 | {end} |" in lines
    assert "| target 0.5 | - | - | - | diverged | - | - | - |" in lines


def test_gaps_to_the_reference_are_at_the_epochs_that_were_validated(compared, tmp_path):
    curves = {"standard": [0.5, 0.6, 0.7], "golden": [0.6, 0.65, 0.7]}
    for (arm, curve), seed in product(curves.items(), (0, 1)):
        shifted = [value + seed / 100 for value in curve]
        write_run(tmp_path, arm, seed, accuracy_by_epoch=shifted, epochs=30)
    lines = lines_of(compared())
    assert "The validation accuracy minus standard, points, same seed:" in lines
    assert "| arm | epoch 10 | epoch 20 | epoch 30 |" in lines
    assert "| golden | +10.00 ± 0.00 | +5.00 ± 0.00 | +0.00 ± 0.00 |" in lines


def test_best_rates_of_a_loss_are_the_lowest_and_unreadable_runs_are_refused(
    tmp_path, capsys
):
    for rate, loss in {0.1: 1.25, 0.2: 1.5}.items():
        options = {"learning_rate": rate, "overrides": ["mode=golden"]}
        write_run(tmp_path / str(rate), "golden", 0, **a_loss(loss, **options))
    arguments = [str(tmp_path), "--best", str(best := tmp_path / "best.txt")]
    assert main(arguments) == 0
    assert best.read_text() == "mode=golden optimizer.lr=0.1\n"
    (tmp_path / "result.json").write_text("{")  # it might have the best rate
    assert main(arguments) == 1
    assert "result.json cannot be used: " in capsys.readouterr().err
    assert best.read_text() == "mode=golden optimizer.lr=0.1\n"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*/summary.md")), ids=str)
def test_a_committed_report_is_that_of_its_committed_runs(page, tmp_path):
    sources = page.read_text().splitlines()[0].split(" in ")[1].split(" and ")
    found = compare(*(ROOT / "docs" / "results" / each for each in sources), out=tmp_path)
    assert found.markdown == page.read_text()
    files = (tmp_path / "summary.csv", page.with_name("summary.csv"))
    # SciPy's last digits differ between versions and machines.
    pd.testing.assert_frame_equal(*map(pd.read_csv, files), rtol=1e-9)


def test_only_finished_runs_are_averaged_and_all_others_are_listed(compared, tmp_path):
    write_runs(tmp_path, {"standard": 4 * [0.9], "golden": [0.8]})
    write_run(
        tmp_path, "golden", 1, test_accuracy=0.1, status="failed", error="out of\nmemory"
    )
    write_run(tmp_path, "golden", 2, test_accuracy=0.1, status="running")
    write_run(tmp_path, "baseline", 1, test_accuracy=None)
    write_run(tmp_path, "baseline", 2, test_accuracy=0.7)
    write_run(tmp_path, "baseline", 3, test_accuracy=0.7)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "result.json").write_text('{"arm": "golden", ')

    comparison = compared()
    rows = by_arm(comparison)
    assert (rows["golden"].n_finished, rows["golden"].n_expected) == (1, 4)
    assert difference(rows["golden"], "test")[:2] == (1, 0.8)
    assert difference(rows["baseline"], "test") == (2, 0.7, 0)
    for line in (
        "golden, seed 1: failed: out of memory (",
        "golden, seed 2: running: no test accuracy (",
        "baseline, seed 1: finished: no test accuracy (",
        "cut/result.json: ",
        "| 1 of 4 |",
        "70.00 ± 0.00 |",
        "# Comparison of 11 runs in ",
    ):
        assert line in comparison.markdown


def test_of_the_runs_of_a_seed_the_newest_finished_one_counts(compared, tmp_path):
    write_run(tmp_path, "golden", 0, test_accuracy=0.7, date="2026-06-01")
    write_run(tmp_path, "golden", 0, test_accuracy=0.8, date="2026-06-02")
    write_run(tmp_path, "golden", 0, status="failed", date="2026-06-03")
    comparison = compared()
    assert by_arm(comparison)["golden"].test_mean == 0.8
    text = "golden, seed 0: replaced: by a finished or newer run ("
    assert comparison.markdown.count(text) == 2


def test_arms_are_sorted_by_effect_under_their_plain_names_and_columns_line_up(
    compared, tmp_path
):
    write_runs(
        tmp_path, {"standard-gamma0_0.786": [0.81], "golden": [0.83], "0.5": [0.82]}
    )
    write_runs(tmp_path, {"standard": [0.8], "baseline": [0.79]})
    write_run(tmp_path, "2.0", 0, status="failed")
    comparison = compared()
    expected = ["standard", "golden", "0.5", "standard-gamma0_0.786", "baseline", "2.0"]
    assert list(comparison.table.arm) == expected
    blocks = comparison.markdown.split("\n\n")
    outcomes, _, costs = (block.splitlines() for block in blocks if block.startswith("|"))
    names = [line.split("|")[1].strip() for line in outcomes[2:]]
    plain = ["golden", "target 0.5", "standard gamma0=0.786", "baseline", "target 2.0"]
    assert names == ["standard", *plain]
    for table in (outcomes, costs):
        bars = {tuple(i for i, c in enumerate(line) if c == "|") for line in table}
        assert len(bars) == 1


def test_baseline_stands_in_for_a_standard_without_finished_runs(compared, tmp_path):
    write_runs(tmp_path, {"baseline": [0.9], "golden": [0.92]})
    write_run(tmp_path, "standard", 0, test_accuracy=0.1, status="failed")
    for arm in ("baseline", "standard"):  # each group has its own reference
        write_run(tmp_path, arm, 0, model="other", test_accuracy=0.5)
    other, ours = compared().markdown.split("## resnet18 on digits\n\n")
    unfinished = "since no arm named standard has a finished run"
    assert ours.startswith(f"Reference: baseline, {unfinished}.\n")
    assert "## other on digits\n\nReference: standard.\n" in other
    # One seed has a mean and no interval.
    line, *_ = [line for line in ours.splitlines() if line.startswith("| golden")]
    assert "| 92.00 | +2.00 (1 pair) |" in " ".join(line.split())


def test_any_arm_can_be_the_reference(compared, tmp_path):
    write_runs(
        tmp_path, {"baseline": [0.9], "golden": [0.7], "standard-gamma0_0.786": [0.6]}
    )
    for name in ("standard gamma0=0.786", "standard-gamma0_0.786"):
        rows = by_arm(compared(reference=name))
        assert rows["golden"].difference_to_reference_mean == 0.7 - 0.6
        assert rows["baseline"].reference == "standard-gamma0_0.786"
    assert by_arm(compared(reference="baseline"))["golden"].reference == "baseline"
    # Known, but not to each model: the default stands in there.
    write_runs(tmp_path, {"standard": [0.9]}, model="vit")
    absent = "since no arm named golden has a finished run"
    assert f"Reference: standard, {absent}.\n" in compared(reference="golden").markdown
    known = "'baseline', 'golden', 'standard', 'standard gamma0=0.786'"
    with pytest.raises(
        ValueError, match=f"got 'glden'. Choose one of these: --reference {known}."
    ):
        compared(reference="glden")


def test_diverged_seeds_have_a_column_of_their_own(compared, tmp_path):
    near = [0.9 + seed / 1000 for seed in range(8)]
    write_runs(tmp_path, {"standard": near, "golden": [*near[:7], 0.1]})
    assert "diverged |" in (markdown := compared().markdown)
    assert "| 8 of 8 |  1 far off |" in markdown
    write_run(tmp_path, "0.5", 0, status="diverged", error="the training loss is nan")
    write_run(tmp_path, "0.5", 1)
    comparison = compared()
    assert "| 1 of 8 |  1 stopped |" in comparison.markdown
    assert (
        "target 0.5, seed 0: diverged: the training loss is nan (" in comparison.markdown
    )
    assert by_arm(comparison)["golden"].test_mean == pytest.approx(
        (8 * 0.9 + 0.021 - 0.8) / 8
    )


BAD = [
    ({"arm": 5}, "arm Input should be a valid string"),
    ({"test_accuracy": 10**400}, "test_score Input should be a valid number"),
    ({"measure": {"name": "loss"}}, "missing 3 required positional arguments: 'unit'"),
    (100_000 * "[" + 100_000 * "]", "Invalid JSON: recursion limit exceeded"),
    ("[]", "Input should be an object"),
]


@pytest.mark.parametrize(("content", "words"), BAD, ids=lambda v: str(v)[:40])
def test_a_wrong_result_is_one_line_and_the_other_runs_are_compared(
    compared, tmp_path, content, words
):
    good = write_run(tmp_path, "standard", 0) / "result.json"
    bad = tmp_path / "bad"
    bad.mkdir()
    if isinstance(content, dict):
        content = json.dumps(json.loads(good.read_text()) | content)
    (bad / "result.json").write_text(content)
    comparison = compared()
    assert list(comparison.table.arm) == ["standard"]
    assert not comparison.complete
    (line,) = [
        line for line in comparison.markdown.splitlines() if "bad/result.json" in line
    ]
    assert words in line
    assert len(line) < 500


def test_versions_dates_and_epochs_come_from_the_runs(compared, tmp_path):
    write_run(tmp_path, "golden", 0, versions={"torch": "2.9.0", "numpy": "2.4"})
    later = "2026-06-03T01:00:00"
    versions = {"torch": "2.8.0", "numpy": "2.4"}
    write_run(tmp_path, "golden", 1, versions=versions, date=later, epochs=2)
    markdown = compared().markdown
    assert "- versions: numpy 2.4, torch 2.9.0 (1 run), 2.8.0 (1 run)\n" in markdown
    assert "- dates: 2026-06-01 to 2026-06-03\n" in markdown
    assert "- epochs: 4 (1 run), 2 (1 run)\n" in markdown


def test_models_are_not_mixed_and_keep_their_own_files(tmp_path):
    write_run(tmp_path, "golden", 0, model="a b", test_accuracy=0.1)
    write_run(tmp_path, "golden", 0, model="a/b", test_accuracy=0.3)
    comparison = compare(tmp_path, out=tmp_path / "out", plots=True)
    assert list(comparison.table.model) == ["a b", "a/b"]
    assert set(comparison.paths) == set((tmp_path / "out").iterdir())
    plots = {path.name for path in comparison.paths}
    assert {"seeds_a%20b_digits.png", "seeds_a%2Fb_digits.png"} < plots


def test_without_a_finished_run_there_is_a_table_and_no_plot(tmp_path):
    write_run(tmp_path, "golden", 0, status="failed", error="boom")
    comparison = compare(tmp_path, plots=True)
    assert {path.name for path in comparison.paths} == {"summary.md", "summary.csv"}
    rows = [row for row in comparison.markdown.splitlines() if row.startswith("| golden")]
    assert [" ".join(row.split()) for row in rows] == [
        "| golden | 0 of 1 |",
        "| golden |",
    ]
    lacking = "since no arm named standard or baseline has a finished run"
    assert f"Reference: none, {lacking}.\n" in comparison.markdown


def test_every_file_is_written_and_printed_and_none_is_blank(tmp_path, capsys):
    for arm, seed in product(("standard", "golden"), range(2)):
        write_variance(
            write_run(tmp_path / "runs", arm, seed, test_accuracy=0.9 + seed / 100)
        )
    out = tmp_path / "new" / "out"
    assert main([str(tmp_path / "runs"), "--out", str(out), "--plots"]) == 0
    names = ("gap", "seeds", "speed", "variance_by_depth")
    plots = {f"{name}_resnet18_digits.png" for name in names}
    assert {path.name for path in out.iterdir()} == plots | {"summary.md", "summary.csv"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    assert all((out / name).stat().st_size > 15_000 for name in plots)
    printed = capsys.readouterr().out
    assert printed.startswith((out / "summary.md").read_text("utf-8"))
    assert {*map(str, out.iterdir())} < set(printed.splitlines())
    summary = pd.read_csv(out / "summary.csv").set_index("arm")
    assert summary.test_mean.to_dict() == pytest.approx(
        {"standard": 0.905, "golden": 0.905}
    )


@pytest.mark.parametrize("name", ["", "nowhere", "object.json", "empty.json"])
def test_command_without_runs_ends_in_one_line(tmp_path, capsys, name):
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "empty.json").write_text("[]")
    assert main([str(tmp_path / name)]) == 1
    printed = capsys.readouterr()
    assert f"{tmp_path / name} holds no runs. Give a directory that has " in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
