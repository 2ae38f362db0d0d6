"""`python -m normplug.bench op`, `sweep`, `table` and `plot`, and the clocks beneath them."""

import json
from itertools import product
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import normplug
from normplug.bench import __main__, rows, timing
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
    assert [(row["direction"], row["provider"]) for row in found] == [*product(("F", "F+B"), TWO)]
    mine, theirs = found[2:]
    assert mine["max_rel"] <= {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    assert mine["over_eager"] == pytest.approx(theirs["us"] / mine["us"])
    passes = {"add_layer_norm": 8, "add_rms_norm": 8, "batch_norm_add_relu": 7}.get(name, 5)
    size = torch.Size(case.shape).numel() * (4 if dtype == "float32" else 2)
    assert mine["gbps"] == pytest.approx(passes * size / mine["us"] / 1e3)
    assert mine["percent_of_copy"] == pytest.approx(100 * mine["gbps"] / mine["copy_gbps"])
    assert {"device", "commit", "date", "torch", "eps"} <= mine.keys()
    assert "max_abs" not in theirs
    # Half of a rounding at least, since no result is exact.
    rounding = torch.finfo(getattr(torch, dtype)).eps
    assert all(rounding / 8 < row["max_rel_f64"] < 60 * rounding for row in (mine, theirs))
    if name != "add_bias_layer_norm":  # which is no fusion, but a function
        (fusion,) = normplug.fusions(ours(Problem(case, CPU).layer))
        assert (fusion.label is not None) == ("add" in name or "lu" in name)


def test_bias_and_layer_norm_are_one_call_of_normplug_and_two_of_torch(monkeypatch):
    function = Mock(wraps=normplug.functional.layer_norm)
    monkeypatch.setattr(normplug.functional, "layer_norm", function)
    problem = Problem(a_case("add_bias_layer_norm"), CPU, eps=1e-3)
    stock = problem.layer
    x = problem.inputs[0]
    y = F.layer_norm(x + stock.input_bias, (10,), stock.norm.weight, stock.norm.bias, 1e-3)
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
    with pytest.raises(AssertionError, match="is wrong: its relative error to float64 is"):
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


def test_a_shape_that_an_operation_does_not_take_is_one_sentence(capsys):
    with pytest.raises(SystemExit, match="normplug.bench op: Expected more than 1 value per chan"):
        main(["op", "batch_norm", "--shape", "1x8", "--device", "cpu"])
    with pytest.raises(SystemExit):
        main(["op", "layer_norm", "--shape", "8", "--device", "cpu"])
    assert "must be sizes joined by x, as 512x8192; got '8'" in capsys.readouterr().err


def test_a_sweep_writes_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "SWEEPS", {"cpu": [(4, 8), (4, 16)]})
    main(["sweep", "--device", "cpu", "-o", str(tmp_path)])
    assert {row["shape"] for row in rows.read_file(tmp_path / "sweep.json")} == {"4x8", "4x16"}
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for name, called in (("normplug", "layer_norm"), ("torch", "aten::native_layer_norm_backward")):
        events = json.loads((tmp_path / f"trace_{name}.json").read_text())["traceEvents"]
        assert any(called in event.get("name", "") for event in events)


def test_a_file_without_rows_or_speeds_is_one_sentence_and_left_as_it_is(tmp_path):
    path = tmp_path / "some.json"
    for content, says in (
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('[{"arm": "golden"}]', "it has no rows of LayerNorm or RMSNorm: `op` and `sweep` write"),
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
    spread = {"us": 4, "us_p20": pytest.approx(2.2), "us_p80": pytest.approx(4.6), "best_us": 1}
    assert found["a"] == spread
    assert found["b"]["us"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_on_a_gpu_every_operation_is_right_and_timed(name):
    shape = (256, 1024) if name in ROWS else (8, 64, 16, 16)
    case = cases([name], [shape], ["bfloat16"])[-1]
    found = measure_op(case, torch.device("cuda"), providers=TWO)
    assert all(0 < row["us"] < 1e5 and row["gbps"] > 0 for row in found)
