"""`python -m normplug.bench op`, `sweep`, `table` and `plot`, and the clocks beneath them."""

import json
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from normplug.bench import __main__, devices, rows, timing
from normplug.bench.__main__ import main
from normplug.bench.op import OPS, PROVIDERS, ROWS, Problem, cases, measure_op, ours

pytestmark = pytest.mark.usefixtures("quick")
CPU = torch.device("cpu")


def a_case(name, dtype="float32"):
    shape = (6, 10) if name in ROWS else (4, 32, 5, 6)
    return cases([name], [shape], [dtype])[-1]


TWO = {name: PROVIDERS[name] for name in ("normplug", "eager")}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_operation_is_right_and_compared_with_torchs(name, dtype):
    case = a_case(name, dtype)
    found = measure_op(case, CPU, providers=TWO)
    assert [(row["direction"], row["provider"]) for row in found] == [
        *product(("F", "F+B"), TWO)
    ]
    mine, theirs = found[2:]
    assert mine["max_rel"] <= {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    assert mine["over_eager"] == pytest.approx(theirs["us"] / mine["us"])
    gated = {"rms_norm_gate": 8, "gate_rms_norm": 8}
    passes = {"add_layer_norm": 8, "add_rms_norm": 8, "batch_norm_add_relu": 7, **gated}
    size = torch.Size(case.shape).numel() * (4 if dtype == "float32" else 2)
    assert mine["gbps"] == pytest.approx(passes.get(name, 5) * size / mine["us"] / 1e3)
    assert mine["percent_of_copy"] == pytest.approx(
        100 * mine["gbps"] / mine["copy_gbps"]
    )
    assert {"device", "commit", "date", "torch", "eps"} <= mine.keys()
    assert "max_abs" not in theirs
    # Half of a rounding at least, since no result is exact.
    rounding = torch.finfo(getattr(torch, dtype)).eps
    assert all(
        rounding / 8 < row["max_rel_f64"] < 60 * rounding for row in (mine, theirs)
    )
    functions = ("add_bias_layer_norm", "adaptive_layer_norm", *gated)
    if name not in functions:  # which are no fusions
        (fusion,) = normplug.fusions(ours(Problem(case, CPU).layer))
        assert (fusion.label is not None) == ("add" in name or "lu" in name)


def test_bias_and_layer_norm_are_one_call_of_normplug_and_two_of_torch(monkeypatch):
    function = Mock(wraps=normplug.functional.layer_norm)
    monkeypatch.setattr(normplug.functional, "layer_norm", function)
    problem = Problem(a_case("add_bias_layer_norm"), CPU, eps=1e-3)
    stock = problem.layer
    x = problem.inputs[0]
    y = F.layer_norm(
        x + stock.input_bias, (10,), stock.norm.weight, stock.norm.bias, 1e-3
    )
    assert stock(x).equal(y)
    assert not function.called
    assert stock.input_bias.abs().max() > 0
    assert ours(stock)(x).equal(y)
    (call,) = function.call_args_list
    assert call.kwargs["input_bias"] is stock.input_bias
    halved = ours(stock, mode=0.25)(x) - stock.norm.bias
    assert halved.allclose((y - stock.norm.bias) / 2, atol=1e-6)


WRONG = {
    "output": lambda y: 0.95 * y,
    "gradient": lambda y: y + 0.01 * (y - y.detach()),
    "nan": lambda y: 0 * y / 0,
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_not_timed(change, capsys):
    def wrong(layer):
        layer.register_forward_hook(lambda layer, x, y: change(y))
        return layer

    case = a_case("layer_norm")
    with pytest.raises(
        AssertionError, match="is wrong: its relative error to float64 is"
    ):
        measure_op(case, CPU, providers={"normplug": wrong})
    others = {"right": lambda layer: layer, "wrong": wrong}
    found = measure_op(case, CPU, providers=TWO | others)
    assert [row["provider"] for row in found[:3]] == ["normplug", "eager", "right"]
    assert "wrong is left out: AssertionError" in capsys.readouterr().err


def test_the_command_measures_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "made" / "rows.json"
    words = ["op", "layer_norm", "--shape", "4x8", "--shape", "2x6", "--eps", "1e-6"]
    main([*words, "--device", "cpu", "--json", str(path)])
    assert "over_eager  over_compile" in capsys.readouterr().out
    found = rows.read_file(path)
    assert {(row["shape"], row["eps"]) for row in found} == {("4x8", 1e-6), ("2x6", 1e-6)}
    assert {row["provider"] for row in found} == {"normplug", "eager", "compile"}
    main(["table", str(path)])
    table = capsys.readouterr().out
    assert "layer_norm  2x6    float32  rows    F+B        normplug" in table
    main(["plot", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def lines_of(table):
    """The cells of each line of a Markdown table, below its header."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_without_a_gpu_the_table_of_devices_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "SIZES", [(4, 8), (6, 10)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["op", "--devices", "cpu,cuda"])
    found = rows.read_file(tmp_path / "devices.json")
    cases_of_rows = [(row["op"], row["shape"], row["layout"]) for row in found[::2]]
    assert cases_of_rows == [
        ("batch_norm", "4x8", "NC"),
        ("batch_norm", "6x10", "NC"),
        ("batch_norm", "4x8x2x2", "NHWC"),
        ("batch_norm", "6x10x2x2", "NHWC"),
        ("layer_norm", "4x8", "rows"),
        ("layer_norm", "6x10", "rows"),
    ]
    assert [row["direction"] for row in found] == 6 * ["F", "F+B"]
    for row in found:
        assert row["cpu_us"] > 0
        assert row["cuda_us"] is None
        assert row["cpu"] == row["device"]
        assert {"commit", "date", "torch", "threads", "cpu_us_p80"} <= row.keys()
    page = (tmp_path / "devices.md").read_text()
    assert page in capsys.readouterr().out
    assert [line[-2:] for line in lines_of(page)] == 12 * [["no CUDA device", "-"]]
    assert (
        f"{found[0]['cpu']}, threads: {torch.get_num_threads()}; GPU: no CUDA device"
        in page
    )
    assert "Speed-up: CPU time / GPU time" in page


def test_the_table_of_devices_takes_the_usual_options_and_files(tmp_path, capsys):
    json = tmp_path / "rows.json"
    page = tmp_path / "page.md"
    words = [
        "op",
        "layer_norm",
        "--devices",
        "cpu,cuda",
        "--shape",
        "4x8",
        "--dtype",
        "float64",
        "--eps",
        "0.5",
    ]
    main([*words, "--json", str(json), "--markdown", str(page)])
    for row in rows.read_file(json):
        facts = [row[key] for key in ("op", "shape", "dtype", "eps", "provider", "mode")]
        assert facts == ["layer_norm", "4x8", "float64", 0.5, "normplug", "standard"]
    for line in lines_of(page.read_text()):
        assert line[:4] == ["layer_norm", "4x8", "rows", "float64"]
    main(["table", str(json)])
    assert "cpu_us" in capsys.readouterr().out


def test_both_devices_take_turns_and_the_speed_up_is_the_ratio_of_their_times(
    monkeypatch,
):
    gpu = SimpleNamespace(type="cuda")
    asked = []

    def on_the_cpu(case, device, eps):
        asked.append(device.type)
        return Problem(case, CPU, eps)

    origin = {"torch": "2.0", "commit": "abc", "date": "2026-11-28", "device": "1 x GPU"}
    monkeypatch.setattr(devices, "Problem", on_the_cpu)
    monkeypatch.setattr(devices, "stamp", lambda gpu: origin)
    found = devices.measure(a_case("layer_norm"), [CPU, gpu])
    assert asked == ["cpu", "cuda"]
    assert [row["direction"] for row in found] == ["F", "F+B"]
    for row in found:
        assert row["speed_up"] == pytest.approx(row["cpu_us"] / row["cuda_us"])
    cells = [rows.cell(found[0][key]) for key in ("cpu_us", "cuda_us", "speed_up")]
    page = devices.markdown(found)
    assert lines_of(page)[0] == ["layer_norm", "6x10", "rows", "float32", "F", *cells]
    assert "; GPU: 1 x GPU; torch 2.0, commit abc, 2026-11-28." in page


def test_a_wrong_result_on_a_device_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        devices, "ours", lambda layer: nn.Sequential(layer, nn.Dropout(0.5))
    )
    with pytest.raises(
        AssertionError, match="normplug on cpu, layer_norm rows 6x10 float32: y is"
    ):
        devices.measure(a_case("layer_norm"), [CPU])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["op"], "it needs NAME and --shape; only --devices has defaults"),
        (["op", "layer_norm"], "it needs NAME and --shape"),
        (["op", "--shape", "4x8"], "it needs NAME and --shape"),
        (
            ["op", "layer_norm", "--shape", "4x8", "--markdown", "a.md"],
            "is for the table of --dev",
        ),
        (["op", "--devices", "cpu,cuda", "--device", "cpu"], "exclude each other"),
        (["op", "--devices", "cpu"], "invalid choice: 'cpu'"),
    ],
)
def test_options_of_an_operation_that_do_not_fit_are_one_sentence(words, says, capsys):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert says in f"{raised.value} {capsys.readouterr().err}"


def test_a_shape_that_an_operation_does_not_take_is_one_sentence(capsys):
    with pytest.raises(
        SystemExit, match="normplug.bench op: Expected more than 1 value per chan"
    ):
        main(["op", "batch_norm", "--shape", "1x8", "--device", "cpu"])
    with pytest.raises(SystemExit):
        main(["op", "layer_norm", "--shape", "8", "--device", "cpu"])
    assert "must be sizes joined by x, as 512x8192; got '8'" in capsys.readouterr().err


def test_a_sweep_writes_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "SWEEPS", {"cpu": [(4, 8), (4, 16)]})
    main(["sweep", "--device", "cpu", "-o", str(tmp_path)])
    assert {row["shape"] for row in rows.read_file(tmp_path / "sweep.json")} == {
        "4x8",
        "4x16",
    }
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for name, called in (
        ("normplug", "layer_norm"),
        ("torch", "aten::native_layer_norm_backward"),
    ):
        events = json.loads((tmp_path / f"trace_{name}.json").read_text())["traceEvents"]
        assert any(called in event.get("name", "") for event in events)


def test_a_plot_shows_every_row_of_every_panel():
    same = {"op": "layer_norm", "layout": "rows", "dtype": "bfloat16", "copy_gbps": 3.9}
    same |= {"device": "CPU", "provider": "normplug"}
    made = [
        {**same, "shape": f"4x{width}", "direction": direction, "gbps": speed}
        for direction, speed in (("F", 1.0), ("F+B", 10.4))
        for width in (8, 16)
    ]
    for axes in rows._figure(made, "title").axes:
        low, high = axes.get_ylim()
        assert low == 0
        assert high > 10.4


def test_a_file_without_rows_or_speeds_is_one_sentence_and_left_as_it_is(tmp_path):
    path = tmp_path / "some.json"
    for content, says in (
        (None, "No such file"),
        ("{", "Expecting property name"),
        (
            '[{"arm": "golden"}]',
            "it has no rows with the GB/s of LayerNorm or RMSNorm: `op NAME` and `sweep` write",
        ),
        ('{"rows": 5}', "is not a list of rows"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(SystemExit, match=f"^normplug.bench plot: .*{says}"):
            main(["plot", str(path)])
    with pytest.raises(ValueError, match="is not a list of rows"):
        rows.add_to_file(path, [{"us": 1}])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == '{"rows": 5}'


def test_calls_take_turns_and_each_round_starts_with_another():
    made = []
    turns = {name: lambda name=name: made.append(name) or [len(made)] for name in "ab"}
    found = timing.in_turns("us", turns, 3)
    assert "".join(made) == "abbaab"
    spread = {"us": 4, "us_p20": 2.2, "us_p80": 4.6, "best_us": 1}
    assert found["a"] == pytest.approx(spread)
    assert found["b"]["us"] == 3


@pytest.mark.gpu
def test_on_a_gpu_the_table_of_devices_has_both_times(tmp_path):
    json = tmp_path / "rows.json"
    main(["op", "--devices", "cpu,cuda", "--shape", "64x128", "--json", str(json)])
    for row in rows.read_file(json):
        assert row["speed_up"] == pytest.approx(row["cpu_us"] / row["cuda_us"])
        assert row["device"] == f"1 x {torch.cuda.get_device_name()}"
    assert "no CUDA device" not in json.with_suffix(".md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_on_a_gpu_every_operation_is_right_and_timed(name):
    shape = (256, 1024) if name in ROWS else (8, 64, 16, 16)
    case = cases([name], [shape], ["bfloat16"])[-1]
    found = measure_op(case, torch.device("cuda"), providers=TWO)
    assert all(0 < row["us"] < 1e5 and row["gbps"] > 0 for row in found)
