"""The scripts of `benchmarks/`, briefly on the CPU, and the documentation that they write."""

import pytest

pytest.importorskip("pandas")

import copy
import math
import re
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from functools import partial
from statistics import median
from unittest.mock import Mock

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import gate
import host
import models
import nets
import norms
import rivals
import tables
from normplug._ops import convolutions
from normplug.bench.__main__ import main
from normplug.bench.op import Problem, cases
from normplug.bench.rows import add_to_file, read_file

pytestmark = pytest.mark.usefixtures("quick")
COUNTS = {5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}


@pytest.mark.parametrize("name", tables.TITLES)
def test_a_committed_page_is_that_of_its_committed_results(name):
    assert tables.text_of(name) == (tables.DOCS / f"{name}.md").read_text()


def test_every_page_of_tables_is_written_from_results():
    pages = {page.stem for page in tables.DOCS.glob("*_h?00.md")}
    assert pages == tables.TITLES.keys()


@pytest.mark.parametrize("page", tables.FILLED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_steps_of_a_page_are_those_of_the_results(page):
    assert tables.filled(page) == page.read_text()


def test_a_page_that_lacks_its_table_is_an_error(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("| model | batch | time |\n|---|---|---|\n| a | 1 | 2 |\n")
    monkeypatch.setitem(tables.FILLED, page, {"model | batch | eager": tables.layouts})
    with pytest.raises(
        ValueError, match="0 tables that start with 'model . batch . eager'"
    ):
        tables.filled(page)
    monkeypatch.setitem(tables.FILLED, page, {"model | batch | time": lambda: "table\n"})
    assert tables.filled(page) == "table\n"


def readme_text():
    """README in one line, without the addresses of its links."""
    text = re.sub(r"\]\([^)]+\)", "]", tables.README.read_text())
    return " ".join(text.replace("[", "").replace("]", "").split())


FIRST_PAGES = {"README": tables.README, "docs": tables.DOCS / "README.md"}


@pytest.mark.parametrize("page", FIRST_PAGES.values(), ids=FIRST_PAGES)
def test_a_page_with_the_first_table_names_its_commit_and_device(page):
    text = page.read_text()
    assert tables.readme_steps() in text
    rows = tables.rows_of(tables.STEPS_PAGE)
    shown = [row for row in rows if (row["model"], row["batch"]) in tables.DOOR_MODELS]
    assert set(re.findall(r"at `(\w{8})`", text)) == {row["commit"] for row in shown}
    assert {row["device"] for row in shown} == {"1 x NVIDIA H200"}
    assert "Medians on one H200" in text


def test_the_readme_says_where_compile_is_faster_without_normplug():
    text = readme_text()
    times, busy, waits = tables.step_times(tables.steps_rows())
    steps, busy = (frame.stack().dropna().to_dict() for frame in (times, busy))
    compiled = {case[:2]: ms for case, ms in steps.items() if case[2] == "compile"}
    faster = [case for case, ms in compiled.items() if ms < steps[(*case, "swap+fuse")]]
    later = tables.later_models()
    earlier = [case for case in compiled if case[0] not in later]
    assert (
        f"alone in {len(faster)} of {len(compiled)} compiled steps ({len(earlier)} of the "
        f"{len(compiled)} were measured with version 0.3.0, on an H100)" in text
    )
    gains = {c: ms / steps[(*c, "swap+fuse+compile")] for c, ms in compiled.items()}
    assert f"Both together are {median(gains.values()):.2f} times as fast" in text
    losses = {case: n for case, n in gains.items() if round(n, 2) < 1}
    assert f"and slower in {COUNTS[len(losses)]}, which are CPU-bound:" in text
    words = text.split("and slower in")[1].split(" In GPU time")[0]
    shown = {tables.MODELS[case[0]]: f"{n:.2f}" for case, n in losses.items()}
    assert set(re.findall(r"0\.\d\d", words)) == set(shown.values())
    for name in shown:
        assert ("a small encoder" if "Encoder" in name else name) in words
    for case in losses:
        assert waits.loc[case, ["compile", "swap+fuse+compile"]].any()
    for case in compiled:
        alone = busy.get((*case, "compile"), math.inf)
        assert busy.get((*case, "swap+fuse+compile"), 0.0) <= 1.01 * alone
    assert (
        "In GPU time, each in its faster layout, none is slower by more than 1%" in text
    )


def test_the_gains_over_compile_alone_are_those_of_the_results():
    """In the table of docs/speed.md, which names the models with the largest."""
    page = (tables.DOCS / "speed.md").read_text()
    header, _, values = page.split("with it; higher is better:\n\n")[1].splitlines()[:3]
    words = [cell.strip() for cell in header.strip("|").split("|")]
    figures = [cell.strip() for cell in values.strip("|").split("|")]
    later = tables.later_models()
    _, busy, _ = tables.step_times(tables.steps_rows())
    gains = (busy["compile"] / busy["swap+fuse+compile"]).dropna().sort_values()
    named = {}
    for text, figure in zip(words[:-1], figures[:-1], strict=True):
        for name in text.split(", "):
            named[name] = figure
    expected = {}
    for (model, _), gain in gains.tail(len(named)).items():
        mark = "" if model in later else " †"
        expected[tables.MODELS[model].split(",")[0] + mark] = f"{gain:.2f}"
    assert named == expected
    others = gains.iloc[: -len(named)]
    assert words[-1] == f"{len(others)} others"
    rest = f"{others.min():.2f} to {others.max():.2f}"
    assert figures[-1] == rest
    faq = (tables.DOCS / "troubleshooting.md").read_text()
    most = gains.tail(len(named))
    span = f"{COUNTS[len(named)]} were {most.min():.2f} to {most.max():.2f} times as fast"
    assert span in faq
    assert f"In {len(others)} other steps the factor was {rest}" in faq


def test_the_readme_has_the_counts_of_tools_and_architectures():
    text = readme_text()
    zoo = read_file(tables.DOCS / "results" / "zoo.json")
    found = Counter(row["result"] for row in zoo)
    tried = len(zoo) - found["skipped"]
    assert found["failed"] == 0
    assert f"0 failures of {tried} in" in text
    assert (
        f"{found['ok']} compared, {found['none taken']} with nothing to swap, "
        f"{found['unsteady']} inconclusive" in text
    )
    table = (tables.DOCS / "compatibility.md").read_text()
    cell = r"(works|refused[^|]*)"
    tools = re.findall(rf"^\| .* \| {cell} \| {cell} \| works \|$", table, re.M)
    standard, golden = zip(*tools, strict=True)
    works = standard.count("works")
    assert f"In mode standard, {works} of {len(tools)} tools work" in text
    refused = len(tools) - golden.count("works")
    assert f"{refused} of the {len(tools)} tools raise an error" in text
    assert len(tools) == len(re.findall(r"^\| ", table, re.M)) - 1


def test_the_readme_says_how_long_its_training_takes():
    rows = read_file(tables.DOCS / "results" / "first_training_cpu.json")
    seconds = sorted(row["seconds"] for row in rows)
    assert {row["command"] for row in rows} == {"python train.py mode=golden"}
    assert 40 < seconds[0] < seconds[-1] < 80
    assert "on two free cores in about a minute" in readme_text()
    page = " ".join((tables.DOCS / "experiments.md").read_text().split())
    assert f"took {seconds[0]:.0f} and {seconds[-1]:.0f} s on two free cores" in page


def test_the_readme_has_the_first_steps_of_the_results():
    """The last four models were timed on another host, as docs/speed_details.md says."""
    longer = {}
    for name, commit in (("first_step_h100", "21c293b"), ("first_step_h200", "d0c4bca")):
        rows = read_file(tables.DOCS / "results" / f"{name}.json")
        rows = [row for row in rows if row["commit"] == commit]
        seconds = {(row["model"], row["arm"]): row["first_step_s"] for row in rows}
        for model in {model for model, _ in seconds}:
            if {(model, "eager"), (model, "swap+fuse")} <= seconds.keys():
                added = seconds[model, "swap+fuse"] - seconds[model, "eager"]
                longer[model] = added  # an H200's, where both were measured
    span = f"{min(longer.values()):.1f} to {max(longer.values()):.1f} s longer than eager"
    assert f"the first step of {len(longer)} models took {span}" in readme_text()


def test_the_price_of_synchronisation_is_that_of_the_results():
    readme = readme_text()
    page = " ".join((tables.DOCS / "distributed_speed.md").read_text().split())
    price, torchs, plain = {}, {}, {}
    names = ("sync_h100", "sync_h200", "sync_later_h200", "sync_idle_h100")
    for name in (*names, "sync_compiled_h100"):
        rows = read_file(tables.DOCS / "results" / f"{name}.json")
        ms = {
            (row["batch"], row["arm"]): row["ms"]
            for row in rows
            if row["model"] == "resnet50"
        }
        for batch in {batch for batch, _ in ms}:
            joined = ms[batch, "normplug+fuse"]
            price[name, batch] = joined / ms[batch, "normplug-local+fuse"]
            if (batch, "torch") in ms:
                torchs[name, batch] = ms[batch, "torch"] / joined
            if (batch, "torch") in ms and (batch, "local") in ms:
                plain[name, batch] = ms[batch, "torch"] / ms[batch, "local"]
    span = f"{min(price.values()):.2f} to {max(price.values()):.2f} times"
    assert f"Synchronised steps took {span} as long as steps that are only" in readme
    assert f"{span} as long as one that is" in page
    limited = f"{price['sync_compiled_h100', 256]:.3f}"
    assert f"and {limited} times where the GPU was the limit (256 images each;" in readme
    shown = {case: f"{ratio:.2f}" for case, ratio in price.items()}
    assert f"| H100 | {shown['sync_h100', 32]} | {shown['sync_h100', 128]} | |" in page
    assert f"| H100, idle host | | {shown['sync_idle_h100', 128]} | |" in page
    assert (
        f"(#under-torchcompile) | | {shown['sync_compiled_h100', 128]} | {limited} |"
        in page
    )
    assert f"| H200 | {shown['sync_h200', 32]} | {shown['sync_h200', 128]} | |" in page
    later = " | ".join(shown["sync_later_h200", batch] for batch in (32, 128, 256))
    assert f"| H200, another host | {later} |" in page
    first = f"{torchs['sync_h100', 128]:.1f} times"
    assert f"took {first} as long as a synchronised and fused one (two H100s" in readme
    over_plain = f"{plain['sync_h100', 128]:.2f} times as long as one with plain"
    assert f"{over_plain} `nn.BatchNorm2d`" in page
    assert f"{first} in the first row of the first table" in page
    lowest, highest = min(torchs.values()), max(torchs.values())
    assert f"takes {lowest:.1f} to {highest:.1f} times as long as a synchronised" in page


def test_a_models_speed_is_over_eager_in_its_faster_layout_and_an_operations_in_its_own():
    arms = {"eager": (8.0, 10.0), "swap": (5.0, 2.0)}
    layouts = ("contiguous", "channels_last")
    rows = [
        {"model": "net", "batch": 2, "layout": layout, "arm": arm, "ms": times[i]}
        for arm, times in arms.items()
        for i, layout in enumerate(layouts)
    ]
    rows += [{"model": "other", "batch": 2, "arm": arm, "ms": 3.0} for arm in arms]
    faster = tables.speeds(rows)["swap"]
    assert faster["net", 2] == 4.0
    assert faster["other", 2] == 1.0
    assert "| channels_last | 10.00 | 2.00 (4.00x) |" in tables.render(rows)
    assert "| contiguous | 8.00 | 5.00 (1.60x) |" in tables.render(rows)
    case = {"op": "norm", "direction": "F", "shape": "2x2", "dtype": "float32"}
    apart = [
        {**case, "layout": layout, "provider": arm, "us": times[i]}
        for arm, times in arms.items()
        for i, layout in enumerate(layouts)
    ]
    assert tables.speeds(apart)["swap"].tolist() == [1.6, 5.0]
    assert "10.0 | 2.0 (5.00x)" in tables.render(
        [row | {"device": "GPU"} for row in apart]
    )


def test_the_memory_of_an_arm_is_that_of_the_layout_in_which_it_is_timed():
    gib = {"eager": (7.5, 7.4), "swap": (5.1, 5.3)}
    ms = {"eager": (8.0, 10.0), "swap": (5.0, 2.0)}
    layouts = ("contiguous", "channels_last")
    rows = [
        {
            "model": "net",
            "layout": layout,
            "arm": arm,
            "ms": ms[arm][i],
            "gib": gib[arm][i],
        }
        for arm in ms
        for i, layout in enumerate(layouts)
    ]
    found = pd.DataFrame(rows)
    memory = tables.values_in_faster_layout(
        tables.pivot(found, "gib"), tables.pivot(found, "ms")
    )
    assert memory.loc["net"].to_dict() == {"eager": 7.5, "swap": 5.3}


def test_every_committed_result_and_picture_is_linked_from_a_page():
    linked = {
        (page.parent / link).resolve()
        for page in tables.DOCS.rglob("*.md")
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text())
    }
    for path in (*(tables.DOCS / "results").iterdir(), *tables.DOCS.rglob("*.png")):
        assert path.resolve() in linked, path


def test_a_page_about_devices_is_the_table_that_the_command_wrote(tmp_path):
    json = tmp_path / "rows.json"
    words = ["op", "layer_norm", "--devices", "cpu,cuda", "--shape", "4x8", "--json"]
    main([*words, str(json)])
    assert tables.render(read_file(json)) == (tmp_path / "rows.md").read_text()


def test_a_suite_writes_rows(tmp_path):
    path = tmp_path / "rows.json"
    words = [
        "--suite",
        "small",
        "--device",
        "cpu",
        "--provider",
        "normplug",
        "--provider",
        "eager",
    ]
    norms.main([*words, "--only", "layer_norm rows 32x128 float32", "--json", str(path)])
    assert {row["op"] for row in read_file(path)} == {"layer_norm", "add_layer_norm"}
    with pytest.raises(SystemExit, match="no case of suite headline has 'nonsense'"):
        norms.main(["--only", "nonsense", "--device", "cpu"])


def test_another_packages_norm_is_compared_after_the_sum_with_a_bias(monkeypatch):
    def norm_of(norm, x):
        return 2 * F.layer_norm(
            x, norm.normalized_shape, norm.weight, norm.bias, norm.eps
        )

    monkeypatch.setattr(rivals, "_RIVALS", {"torch": {"layer_norm": norm_of}})
    assert not rivals.of("add_layer_norm")
    (change,) = rivals.of("add_bias_layer_norm").values()
    (case,) = cases(["add_bias_layer_norm"], [(4, 8)], ["float32"])
    stock = Problem(case, torch.device("cpu"))
    found = stock.results(change(copy.deepcopy(stock.layer)))
    assert found.keys() == stock.stock.keys()
    for name, value in stock.stock.items():
        torch.testing.assert_close(found[name], 2 * value)


def test_other_arms_differ_from_the_usual_as_their_names_say(
    tmp_path, monkeypatch, capsys
):
    small = partial(nets.NETS["nnunet3d"].make, size=8, widths=(4, 8))
    missing = Mock(side_effect=ImportError("no diffusers"))
    for name, make in {"unet2d": missing, "nnunet3d": small}.items():
        monkeypatch.setitem(nets.NETS, name, nets.Net(make, (2,)))
    path = tmp_path / "rows.json"
    words = ["--rows", "unet2d", "nnunet3d", "--device", "cpu", "--rounds", "1"]
    arms = ["eager", "swap+fuse", "no-norm", "liger"]
    models.main([*words, "--json", str(path), "--arms", *arms])
    assert "unet2d is left out: ImportError: no diffusers" in capsys.readouterr().err
    rows = {row["arm"]: row for row in read_file(path)}
    assert set(rows) == {"eager", "swap+fuse", "no-norm"}  # the model is no Llama
    assert rows["no-norm"]["loss"] != pytest.approx(rows["eager"]["loss"])


def test_an_arm_leaves_the_gradients_of_convolutions_to_pytorch():
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            seen.append(convolutions.DEVICES)
            return x

    models.PlainConvolutions(Net())(1)
    assert seen == [()]
    assert convolutions.DEVICES == ("cuda",)


def test_images_are_timed_in_each_layout_and_a_text_once(monkeypatch):
    dense = []

    def volumes(batch):
        model, data, loss = nets.NETS["nnunet3d"].make(batch, size=8, widths=(4, 8))
        model[0].stage[3].register_forward_pre_hook(
            lambda conv, _: dense.append(conv.weight.is_contiguous())
        )
        return model, data, loss

    small = {"volumes": volumes, "text": partial(nets.encoder, width=8, layers=1)}
    for name, make in small.items():
        monkeypatch.setitem(models.NETS, name, nets.Net(make, (2,)))
    args = Namespace(
        rows=small,
        batch=None,
        layout=nets.LAYOUTS,
        arms=["eager"],
        rounds=1,
        device="cpu",
    )
    found = [row for rows in models.measure(args) for row in rows]
    assert [(row["model"], row.get("layout")) for row in found] == [
        ("volumes", "contiguous"),
        ("volumes", "channels_last"),
        ("text", None),
    ]
    half = len(dense) // 2
    assert all(dense[:half])
    assert not any(dense[half:])


@pytest.mark.parametrize(
    ("speeds", "why"),
    [
        ([1.5] * 3, ""),  # equal
        ([1.2, 1.43, 1.9], ""),  # the median is slower, and within 5%
        ([1.8] * 3, ""),
        ([1.4, 1.42, 1.5], "slower by more than 5%"),
        ([1.5] * 2, "fewer than 3 runs"),
        ([], "not measured"),
    ],
)
def test_the_gate_names_the_rows_that_have_become_slower(tmp_path, speeds, why):
    for name, runs in {"new": speeds, "old": [1.5]}.items():
        arms = [("eager", 1.0), ("liger", len(runs)), *3 * [("swap", 1.1)]]
        arms += [("swap+fuse", speed) for speed in runs]
        rows = [
            {"model": "net", "batch": 2, "arm": arm, "over_eager": n} for arm, n in arms
        ]
        add_to_file(tmp_path / f"{name}.json", rows)
    failed = f"^1 of 2 rows fail:\nnet, 2, swap\\+fuse: {why}$"
    with pytest.raises(SystemExit, match=failed) if why else nullcontext():
        gate.main([str(tmp_path / "new.json"), "--against", str(tmp_path / "old.json")])


def test_the_gate_compares_models_with_and_without_a_layout(tmp_path, capsys):
    text = {"model": "text", "batch": 2, "arm": "swap", "over_eager": 1.5}
    image = text | {"model": "image", "layout": "channels_last"}
    add_to_file(tmp_path / "old.json", [text, image])
    add_to_file(tmp_path / "new.json", [text] * 3)
    words = [str(tmp_path / "new.json"), "--against", str(tmp_path / "old.json")]
    gate.main([*words, "--rows", "text"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["model", "batch", "arm"]
    with pytest.raises(SystemExit, match="image, 2, channels_last, swap: not measured$"):
        gate.main(words)
    add_to_file(tmp_path / "new.json", [image] * 3)
    gate.main(words)


def test_single_calls_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CASES", cases(["add_layer_norm"], [(4, 8)], ["float32"]))
    path = tmp_path / "rows.json"
    host.main(["--device", "cpu", "--json", str(path)])
    rows = read_file(path)
    assert [row["provider"] for row in rows] == 2 * list(host.WAYS)
    assert [row["direction"] for row in rows] == 5 * ["F"] + 5 * ["F+B"]
    assert all(row["wall_us"] > 0 and row["over_eager"] > 0 for row in rows)
