"""The bench's JSON files: how they are kept, and the tables and pictures that are made of them."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from normplug.bench import host, results, rivals
from normplug.bench.__main__ import main
from normplug.bench.groups import GROUPS
from normplug.bench.kernels import OPS, PROVIDERS
from normplug.bench.plot import ARMS, NAMES, STYLES, draw, speed_figure, step_figure
from normplug.bench.results import Results
from normplug.bench.suites import WIDTHS
from normplug.bench.table import render
from training import ROOT

KERNELS = {
    "device": "NVIDIA H100",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "date": "2026-11-21T12:00:00+00:00",
    "copy_gbps": 3020.4,
    "rows": [
        {
            "op": op,
            "direction": "F",
            "layout": "NHWC",
            "shape": shape,
            "dtype": "bfloat16",
            "provider": provider,
            "us": us,
            "host_us": 41.26,
            "wall_us": 152.6,
            "floor_passes": 2,
            "percent_of_copy": percent,
        }
        for op, shape, provider, us, percent in [
            ("bn", [128, 256, 56, 56], "normplug", 150.4, 90.6),
            ("bn", [128, 256, 56, 56], "eager", 640.0, 21.2),
            ("bn_relu", [32, 64, 14, 14], "eager", 9.96, 12.4),
        ]
    ],
}
TABLE = """\
NVIDIA H100, torch 2.11.0, triton 3.6.0, 2026-11-21. Copy: 3020 GB/s, read and written.

GPU time, as % of the speed of a copy that moves the fewest bytes the operation can \
(bn: F 2P; bn_relu: F 2P), and median microseconds:

| op | direction | layout | shape | dtype | normplug | eager | normplug over eager |
| --- | --- | --- | --- | --- | ---: | ---: | ---: |
| bn | F | NHWC | 128x256x56x56 | bfloat16 | 91% (150) | 21% (640) | 4.26x |
| bn_relu | F | NHWC | 32x64x14x14 | bfloat16 | - | 12% (10.0) | - |

Small shapes, microseconds a call: until the host is free again / in calls back to back, host and \
GPU overlapped. The last columns compare calls back to back:

| op | direction | layout | shape | dtype | eager |
| --- | --- | --- | --- | --- | ---: |
| bn_relu | F | NHWC | 32x64x14x14 | bfloat16 | 41.3 / 153 |
"""


def a_row(model, batch, arm, ms):
    figures = {"images_per_s": 1e3 * batch / ms, "peak_gib": ms / 10, "host_ms": ms / 4}
    spread = {"ms_p20": 0.8 * ms, "ms_p80": 1.25 * ms}
    return {"model": model, "batch": batch, "arm": arm, "ms": ms, **figures, **spread}


MODELS = {
    "device": "a GPU",
    "versions": {"torch": "2.15"},
    "date": "2026-11-22T01:02:03+00:00",
    "settings": {"mode": "golden", "autocast": "bfloat16", "optimizer": "SGD, momentum 0.9"},
    "rows": [a_row("net", *rest) for rest in ((8, "eager", 20), (8, "swap", 16), (4, "swap", 10))],
}


def test_results_are_on_disk_after_each_row(tmp_path):
    path = tmp_path / "made" / "rows.json"
    kept = Results(path, results.KERNELS, copy_gbps=3000.0)
    for count in (1, 2):
        kept.add({"us": float(count)})
        content = json.loads(path.read_text())
        assert content["copy_gbps"] == 3000.0
        assert [row["us"] for row in content["rows"]] == [1.0, 2.0][:count]
    assert {"device", "versions", "date"} <= content.keys()
    assert {"torch", "cuda", "python", "normplug"} <= content["versions"].keys()


def test_the_table_command(tmp_path, capsys):
    source, target = tmp_path / "rows.json", tmp_path / "docs" / "rows.md"
    source.write_text(json.dumps(KERNELS))
    main(["table", str(source)])
    assert capsys.readouterr().out == TABLE
    main(["table", str(source), "-o", str(target)])
    assert target.read_text() == TABLE


def test_the_table_of_models_has_a_line_for_each_case_and_a_cell_for_each_arm():
    lines = render(results.MODELS, MODELS).splitlines()
    assert lines[0] == (
        "a GPU, torch 2.15, 2026-11-22. Training under bfloat16 autocast, SGD, momentum 0.9; "
        "swapped in mode golden."
    )
    tables = [line for line in lines if line.startswith("| net")]
    assert tables == [
        "| net | 8 | 20.00 ms, 400/s | 16.00 ms, 500/s | 1.25x |",
        "| net | 4 | - | 10.00 ms, 400/s | - |",
        "| net | 8 | 5.00 | 4.00 | 1.25x |",
        "| net | 4 | - | 2.50 | - |",
        "| net | 8 | 2.00 | 1.60 |",
        "| net | 4 | - | 1.00 |",
    ]
    assert lines.count("| model | batch | eager | swap | swap over eager |") == 2
    assert lines.count("| model | batch | eager | swap |") == 1


def test_the_table_of_a_profile_has_a_line_for_each_arm_and_a_cell_for_each_group():
    rows = [
        {"model": "net", "batch": 8, "arm": arm, "kernels": [], "groups_ms": times}
        for arm, times in (
            ("swap", {name: float(place) for place, name in enumerate(GROUPS)}),
            ("eager", dict.fromkeys(GROUPS, 5.0)),
        )
    ]
    lines = render(results.PROFILE, {**MODELS, "rows": rows}).splitlines()
    assert f"| model | batch | arm | {' | '.join(GROUPS)} | all | over eager |" in lines
    assert lines[-2] == (
        "| net | 8 | swap | 0.00 | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 15.00 | 2.00x |"
    )
    assert lines[-1].endswith("| 5.00 | 30.00 | - |")


def test_the_table_compares_normplug_with_each_of_the_others():
    def row(provider, us, **others):
        return {**KERNELS["rows"][0], "provider": provider, "us": us, **others}

    rows = [
        row("normplug", 10.0, difference=3e-8, dtype="float32"),
        row("normplug-triton", 11.0, difference=2e-7, dtype="float32"),
        *(row(name, us, dtype="float32") for name, us in (("eager", 20.0), ("cpu", 500.0))),
        row("normplug-triton", 40.0),
        row("eager", 20.0),
    ]
    content = {**KERNELS, "rows": rows, "cpu": "CPU, 2 x Fast"}
    lines = render(results.KERNELS, content).splitlines()
    assert "cpu: eager's wall time, CPU, 2 x Fast." in lines[0]
    assert "| cpu | normplug over eager | normplug over cpu |" in lines[4]
    assert lines[6].endswith("| 2.00x | 50.00x |")
    assert lines[7].endswith("| - | 91% (40.0) | 91% (20.0) | - | - | - |")
    assert lines[-1].endswith("| 3.0e-08 | **2.0e-07** |")


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*_h100.md")), ids=lambda page: page.stem
)
def test_a_committed_table_is_that_of_its_committed_results(page, capsys):
    main(["table", str(ROOT / "docs" / "results" / f"{page.stem}.json")])
    assert capsys.readouterr().out == page.read_text()


def test_every_committed_result_and_picture_is_linked_from_a_page():
    docs = ROOT / "docs"
    pages = "".join(page.read_text() for page in docs.glob("*.md"))
    for path in (*(docs / "results").iterdir(), *docs.rglob("*.png")):
        assert f"({path.relative_to(docs).as_posix()})" in pages, path


PANELS = list(product(("bfloat16", "float32"), ("F", "F+B")))


def speeds(op="ln"):
    """Rows in which a provider's speed is its place times the width; liger knows no large one."""
    keys = ("op", "dtype", "direction", "shape", "provider", "gbps")
    rows = [
        dict(zip(keys, (op, *panel, [4096, width], provider, float(place * width)), strict=True))
        for width, panel in product(reversed(WIDTHS), PANELS)
        for place, provider in enumerate(("normplug", "eager", "liger"), 1)
        if provider != "liger" or width <= 65536
    ]
    other = {**rows[0], "shape": [512, 8192], "gbps": 1e9}
    return {**KERNELS, "rows": [*KERNELS["rows"], *rows, other]}


def test_the_picture_of_kernels_has_a_line_for_each_provider_in_each_panel():
    figure = speed_figure(speeds())
    names = {"F": "forward", "F+B": "forward and backward"}
    titles = [f"{names[direction]}, {dtype}" for dtype, direction in PANELS]
    assert [axes.get_title("left") for axes in figure.axes] == titles
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert set(lines) == {"normplug", "eager", "liger", "copy"}
        for place, provider in enumerate(("normplug", "eager"), 1):
            assert list(lines[provider].get_xdata()) == list(WIDTHS)
            assert list(lines[provider].get_ydata()) == [place * width for width in WIDTHS]
        assert max(lines["liger"].get_xdata()) == 65536
        assert set(lines["copy"].get_ydata()) == {KERNELS["copy_gbps"]}
        assert axes.get_xscale() == "log"
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(lines)


def test_the_picture_of_models_has_a_bar_for_each_arm_of_each_case_with_eager():
    rows = [*MODELS["rows"], a_row("other", 2, "eager", 4.0), a_row("other", 2, "no-norm", 1.0)]
    (axes,) = step_figure({**MODELS, "rows": rows}).axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["net\nbatch 8", "other\nbatch 2"]
    bars = {bars.get_label(): bars for bars in axes.containers if bars.get_label() in ARMS}
    lengths = {arm: [bar.get_width() for bar in found] for arm, found in bars.items()}
    assert lengths == {"eager": [1.0, 1.0], "swap": [1.25]}
    (segment,) = bars["swap"].errorbar.lines[2][0].get_segments()
    np.testing.assert_allclose(segment[:, 0], [20 / (1.25 * 16), 20 / (0.8 * 16)])
    with pytest.raises(ValueError, match="no row of eager"):
        step_figure({**MODELS, "rows": MODELS["rows"][2:]})


def test_the_gpus_time_has_a_panel_and_a_table_of_its_own():
    rows = [{**a_row("net", 8, arm, 20), "gpu_ms": ms} for arm, ms in (("eager", 18), ("swap", 12))]
    content = {**MODELS, "rows": [*rows, a_row("net", 8, "liger", 10)]}
    _, axes = step_figure(content).axes
    assert axes.get_title("left") == "GPU busy (mean of a trace)"
    assert [bar.get_width() for bars in axes.containers for bar in bars] == [1.0, 1.5]
    assert "| net | 8 | 18.00 | 12.00 | 1.50x |" in render(results.MODELS, content).splitlines()


def test_every_provider_has_a_look_of_its_own_without_colours_too():
    assert set(STYLES) == {*PROVIDERS, *host.PROVIDERS, *rivals.PACKAGES, "cpu"}
    for looks in (STYLES, ARMS):
        for each in ("colour", "marker", "hatch"):
            assert len({getattr(style, each) for style in looks.values()}) == len(looks)
    assert set(NAMES) == set(OPS)


def lengths(axes, left):
    """Series -> case -> length of the bars of a panel; `left` begins its row and has the labels."""
    cases = list(zip(axes.get_yticks(), left.get_yticklabels(), strict=True))

    def case(bar):
        return min(cases, key=lambda tick: abs(tick[0] - bar.get_center()[1]))[1].get_text()

    return {
        bars.get_label(): {case(bar): bar.get_width() for bar in bars} for bars in axes.containers
    }


def test_the_picture_of_shapes_has_a_panel_for_each_layout_and_direction():
    rows = [
        {**KERNELS["rows"][0], "provider": name, "percent_of_copy": float(place), **others}
        for place, name in enumerate(("normplug", "normplug-triton", "eager"), 1)
        for others in (
            {},
            {"op": "bn_relu"},
            {"direction": "F+B"},
            {"layout": "NCHW", "direction": "F+B"},
        )
    ]
    figure = draw(results.KERNELS, {**KERNELS, "rows": rows})
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == [
        f"{direction}, {layout}"
        for layout in ("channels_last (NHWC)", "contiguous (NCHW)")
        for direction in ("forward", "forward and backward")
    ]
    first, second, third, _ = figure.axes
    both = {f"{name}\n128x256x56x56": 1.0 for name in ("BatchNorm", "BatchNorm + ReLU")}
    assert lengths(first, first) == {"eager": dict.fromkeys(both, 3.0), "normplug": both}
    assert lengths(second, first)["normplug"] == {"BatchNorm\n128x256x56x56": 1.0}
    assert lengths(third, third) == {"eager": {}, "normplug": {}}
    assert "NVIDIA H100, torch 2.11.0, triton 3.6.0, 2026-11-21" in figure.get_suptitle()
    assert "3,020 GB/s" in figure.get_suptitle()


def test_the_picture_of_the_host_has_a_panel_for_each_direction():
    content = json.loads(result("host"))
    forward, both = draw(results.HOST, content, dtypes=["float32"]).axes
    assert forward.get_xlabel() == "microseconds a call"
    for axes, direction in ((forward, "F"), (both, "F+B")):
        for provider, bars in lengths(axes, forward).items():
            found = ("float32", direction, provider)
            rows = (
                r for r in content["rows"] if (r["dtype"], r["direction"], r["provider"]) == found
            )
            assert list(bars.values()) == [row["wall_us"] for row in rows]
    with pytest.raises(ValueError, match="no row of float64"):
        draw(results.HOST, content, dtypes=["float64"])


def test_the_plot_command(tmp_path):
    source, target = tmp_path / "rows.json", tmp_path / "made" / "speed.png"
    source.write_text(json.dumps(speeds()))
    main(["plot", str(source), "--norm", "LayerNorm", "--dtype", "bfloat16", "-o", str(target)])
    assert target.read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps(MODELS))
    main(["plot", str(source)])
    assert source.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps(speeds(op="ln_stats")))
    for norm, reason in (("LayerNorm", "ln with 4096 rows"), ("GroupNorm", "GroupNorm")):
        with pytest.raises(SystemExit, match=rf"rows\.json: no row of {reason}"):
            main(["plot", str(source), "--norm", norm])


def result(name, device="h100"):
    return (ROOT / "docs" / "results" / f"{name}_{device}.json").read_bytes()


HALF_A_ROW = json.dumps({**KERNELS, "rows": [{"op": "ln"}]}).encode()
A_RUN = b'{"arm": "golden", "seed": 0, "status": "failed"}'
OTHER_KINDS = {
    "a trace": (b'{"traceEvents": []}', "a trace, as `normplug.bench kernels --trace` writes"),
    "a run": (A_RUN, "the result of a run, as `train.py` writes"),
    "a list": (b"[{}, {}]", "holds a list. This command takes what `normplug.bench kernels`"),
    "a number": (b"5", "holds no result of normplug. This command takes"),
    "odd rows": (b'{"copy_gbps": 1, "rows": 5}', "holds no result of normplug"),
    "half a row": (HALF_A_ROW, "holds no result of normplug"),
    "an empty file": (b" \n", "is empty."),
    "no JSON": (b"{", "is not JSON: Expecting property name"),
    "no text": (b"\x89PNG", "is not JSON: it is not text in UTF-8."),
    "steps of processes": (result("sync", "h200"), "as `normplug.bench sync` writes; it has no"),
    "no file": (None, "cannot be read: "),
    "sweeps of schemes": (result("layer_norm_schemes"), "holds no result of normplug"),
    "runs": (result("cifar10_jpeg"), "holds a list."),
}


@pytest.mark.parametrize("name", ["plot", "table"])
@pytest.mark.parametrize(("content", "says"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_file_of_another_kind_is_named_in_one_line(tmp_path, name, content, says):
    source = tmp_path / "some.json"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main([name, str(source)])
    message = str(caught.value)
    assert message.startswith(f"normplug.bench {name}: {source} ")
    assert says in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == [source][: content is not None]


def test_a_profile_is_no_plot_but_a_table():
    source = str(ROOT / "docs" / "results" / "models_profile_h100.json")
    with pytest.raises(SystemExit, match=r"`normplug\.bench table` takes it\.") as caught:
        main(["plot", source])
    assert "a profile of training steps, as `normplug.bench models --prof" in str(caught.value)


def test_a_row_that_lacks_what_is_drawn_is_said_in_one_line(tmp_path):
    source = tmp_path / "rows.json"
    content = speeds()
    for row in content["rows"]:
        row.pop("gbps", None)
    source.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"normplug\.bench plot: .*rows\.json lacks 'gbps'\.$"):
        main(["plot", str(source), "--norm", "LayerNorm"])


def test_a_file_without_rows_is_of_its_kind(tmp_path):
    path = tmp_path / "rows.json"
    Results(path, results.HOST, settings={})
    with pytest.raises(SystemExit, match=r"normplug\.bench table: .*rows\.json has no rows: its"):
        main(["table", str(path)])
    with pytest.raises(ValueError, match="times of single calls, as `normplug.bench host` writes"):
        Results(path, results.MODELS, resume=True, settings={})


@pytest.mark.parametrize("name", ["kernels", "models"])
def test_without_a_gpu_it_says_so(name, monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        main([name])
    message = "normplug.bench needs a CUDA device; torch.cuda.is_available() is False."
    assert caught.value.code == message
