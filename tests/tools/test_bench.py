import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from normplug.bench import results, rivals
from normplug.bench.__main__ import main
from normplug.bench.accuracy import relative_errors, require_accurate
from normplug.bench.kernels import OPS, PROVIDERS, figures, floor_bytes, measure, memory_for
from normplug.bench.plot import STYLES, speed_figure
from normplug.bench.suites import (
    BATCH_NORMS,
    DTYPES,
    LAYER_NORMS,
    SUITES,
    WIDTHS,
    Case,
    layouts,
    select,
)
from normplug.bench.timing import FEWEST, MOST, TURN, HostTime, Stopwatch
from normplug.bench.trace import trace

ROOT = Path(__file__).parents[2]
SMALL = Case("bn_add_relu", "NHWC", (8, 16, 4, 4), "bfloat16")
GOLDEN = (5**0.5 - 1) / 2


class Still:
    """A stopwatch that calls once and shows the same every time."""

    def gpu_us(self, calls):
        for call in calls.values():
            call()
        return {name: [10.0, 30.0, 20.0] for name in calls}

    def host_time(self, calls):
        return dict.fromkeys(calls, HostTime(7.0, 25.0))


def rows_of(case, providers=("normplug", "eager")):
    return [row for rows in measure(case, providers, Still(), 100.0, "cpu") for row in rows]


def test_the_ops_are_those_of_the_suites():
    assert tuple(OPS) == (*BATCH_NORMS, *LAYER_NORMS)
    for cases in SUITES.values():
        assert len(set(cases)) == len(cases)
        assert {case.op for case in cases} <= set(OPS)
        assert {case.dtype for case in cases} <= set(DTYPES)
    for suite in ("headline", "full"):
        assert {case.op for case in SUITES[suite]} == set(OPS)


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        ("headline", Case("bn", "NCHW", (512, 64, 32, 32), "bfloat16")),
        ("headline", Case("bn", "NHWC", (128, 256, 56, 56), "float32")),
        ("headline", Case("bn_add_relu", "NHWC", (256, 512, 28, 28), "bfloat16")),
        ("seed", Case("bn", "NC", (1024, 100_000), "float64")),
        ("seed", Case("bn", "NCHW", (128, 256, 56, 56), "float32")),
        ("small", Case("bn", "NC", (32, 128), "float32")),
        ("small", Case("bn_relu", "NHWC", (64, 512, 7, 7), "bfloat16")),
        ("full", Case("bn", "NHWC", (4, 32, 16, 56, 56), "bfloat16")),
        ("full", Case("bn", "NCHW", (64, 128, 1024), "bfloat16")),
        ("full", Case("bn", "NHWC", (100, 33, 17, 19), "bfloat16")),
        ("full", Case("bn", "NCHW", (128, 256, 56, 56), "float16")),
        ("full", Case("bn", "NC", (1024, 1000), "float64")),
        *(
            ("headline", Case("ln", "rows", (4096, 2**power), dtype))
            for power in (8, *range(10, 18))
            for dtype in ("bfloat16", "float32")
        ),
        ("headline", Case("ln", "rows", (4096, 768), "bfloat16")),
        ("headline", Case("ln", "rows", (50432, 768), "float32")),
        ("headline", Case("ln", "rows", (512, 8192), "bfloat16")),
        ("headline", Case("ln_stats", "rows", (50432, 768), "bfloat16")),
        ("headline", Case("ln_stats", "rows", (4096, 8192), "bfloat16")),
        ("headline", Case("add_ln", "rows", (50432, 768), "bfloat16")),
        ("headline", Case("add_ln", "rows", (8192, 4096), "bfloat16")),
        ("headline", Case("bias_ln", "rows", (512, 8192), "float32")),
        ("headline", Case("bias_ln", "rows", (512, 8192), "bfloat16")),
        ("headline", Case("bias_ln", "rows", (401408, 96), "bfloat16")),
        ("small", Case("ln", "rows", (32, 128), "bfloat16")),
        ("small", Case("ln_stats", "rows", (512, 256), "float32")),
        ("small", Case("add_ln", "rows", (4096, 256), "bfloat16")),
        ("full", Case("ln", "rows", (1, 1048576), "bfloat16")),
        ("full", Case("ln", "rows", (4096, 12288), "bfloat16")),
        ("full", Case("ln", "rows", (50432, 768), "float16")),
    ],
    ids=str,
)
def test_a_suite_has_the_cases_it_is_named_for(suite, case):
    assert case in SUITES[suite]


def test_select_takes_what_fits_every_filter():
    chosen = select("small", ["bn", "bn_relu"], ["float32"], "NHWC 32x64x14x14")
    assert list(map(str, chosen)) == [
        "bn NHWC 32x64x14x14 float32",
        "bn_relu NHWC 32x64x14x14 float32",
    ]
    assert select("seed", None, None, "") == list(SUITES["seed"])


@pytest.mark.parametrize(
    ("op", "passes"),
    [
        ("bn", (2, 5)),
        ("bn_relu", (2, 5)),
        ("bn_add_relu", (3, 7)),
        ("ln", (2, 5)),
        ("ln_stats", (2, 5)),
        ("add_ln", (4, 8)),
        ("bias_ln", (2, 5)),
    ],
)
def test_floors(op, passes):
    assert tuple(OPS[op].passes.items()) == (("F", passes[0]), ("F+B", passes[1]))
    assert floor_bytes(Case(op, "NC", (10, 3), "bfloat16"), passes[0]) == passes[0] * 10 * 3 * 2
    assert floor_bytes(Case(op, "NC", (10, 3), "float64"), passes[1]) == passes[1] * 10 * 3 * 8


def test_figures():
    # 4e6 bytes in 2 us are 2e12 bytes a second.
    made = figures(4_000_000, [1.0, 2.0, 3.0, 2.0, 2.0, 9.0], copy_gbps=4000.0)
    assert made["us"] == 2.0
    assert (made["us_p20"], made["us_p80"]) == (2.0, 3.0)
    assert made["gbps"] == pytest.approx(2000.0)
    assert made["percent_of_copy"] == pytest.approx(50.0)


def test_a_row_says_what_was_measured():
    rows = rows_of(SMALL)
    assert [(row["direction"], row["provider"]) for row in rows] == [
        ("F", "normplug"),
        ("F", "eager"),
        ("F+B", "normplug"),
        ("F+B", "eager"),
    ]
    assert (
        rows[0].items()
        >= {
            "op": "bn_add_relu",
            "layout": "NHWC",
            "shape": [8, 16, 4, 4],
            "dtype": "bfloat16",
            "us": 20.0,
            "host_us": 7.0,
            "wall_us": 25.0,
            "floor_bytes": 3 * 8 * 16 * 4 * 4 * 2,
        }.items()
    )
    assert rows[1]["aten_backend"] == "Native"
    assert "aten_backend" not in rows[0]


def test_a_provider_without_a_kernel_has_no_row(monkeypatch):
    def no_kernel(**tensors):
        raise NotImplementedError

    without = dataclasses.replace(OPS["bn_add_relu"], normplug=no_kernel)
    monkeypatch.setitem(OPS, "bn_add_relu", without)
    assert [row["provider"] for row in rows_of(SMALL)] == ["eager", "eager"]
    assert rows_of(SMALL, ["normplug-triton"]) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 33), (6, 33, 7), (6, 33, 4, 5), (3, 33, 2, 4, 5)], ids=str)
@pytest.mark.parametrize("op", BATCH_NORMS)
def test_normplug_is_found_right_on_any_shape(op, shape, dtype):
    for layout in layouts(shape):
        assert rows_of(Case(op, layout, shape, dtype), ["normplug"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 33), (37, 64), (300, 5)], ids=str)
@pytest.mark.parametrize("op", LAYER_NORMS)
def test_normplug_is_found_right_on_any_rows(op, shape, dtype):
    assert rows_of(Case(op, "rows", shape, dtype), ["normplug"])


def test_channels_last_is_channels_last():
    problem = OPS["bn_add_relu"].make(SMALL, "cpu")
    for tensor in (problem.leaves["x"], problem.leaves["residual"], problem.gradients["y"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_the_truth_in_groups_of_channels_is_the_whole_truth(monkeypatch):
    case = Case("bn_add_relu", "NCHW", (6, 5, 4, 3), "float64")
    op = OPS[case.op]
    problem = op.make(case, "cpu")
    outputs = problem.outputs(op.eager)
    monkeypatch.setattr("normplug.bench.batch_norm.CHUNK_ELEMENTS", 2 * 6 * 4 * 3)
    errors = relative_errors(outputs, op.truth(problem, 1.0))
    assert set(errors) == {
        "y",
        *("dx", "dweight", "dbias", "dresidual"),
        *("running_mean", "running_var", "num_batches_tracked"),
    }
    assert max(errors.values()) < 1e-13


def stock_layer_norm(x, weight, bias, residual=None, input_bias=None, **state):
    """In float64, by autograd; running statistics spelled out."""
    h = x if residual is None else x + residual
    h = h if input_bias is None else h + input_bias
    if state:
        mean, var = h.detach().mean(1), h.detach().var(1, correction=0)
        state["running_mean"].copy_(0.9 * state["running_mean"] + 0.1 * mean.mean())
        state["running_var"].copy_(0.9 * state["running_var"] + 0.1 * var.mean())
        state["num_batches_tracked"].fill_(1)
    y = F.layer_norm(h, x.shape[1:], weight, bias, 1e-5)
    return y if residual is None else (y, h)


@pytest.mark.parametrize(
    ("op", "others"),
    [
        ("ln", set()),
        ("ln_stats", {"running_mean", "running_var", "num_batches_tracked"}),
        ("add_ln", {"total", "dresidual"}),
        ("bias_ln", {"dinput_bias"}),
    ],
)
def test_the_truth_of_layer_norm_in_groups_of_rows_is_that_of_autograd(op, others, monkeypatch):
    monkeypatch.setattr("normplug.bench.layer_norm.CHUNK_ELEMENTS", 3 * 7)
    problem = OPS[op].make(Case(op, "rows", (11, 7), "float64"), "cpu")
    truth = list(OPS[op].truth(problem, 1.0))
    assert [piece.where for piece in truth if piece.name == "y"] == [
        (slice(first, first + 3),) for first in (0, 3, 6, 9)
    ]
    errors = relative_errors(problem.outputs(stock_layer_norm), truth)
    assert set(errors) == {"y", "dx", "dweight", "dbias"} | others
    assert max(errors.values()) < 1e-13


def test_the_total_is_rounded_before_it_is_normalised():
    op = OPS["add_ln"]
    problem = op.make(Case("add_ln", "rows", (8, 64), "bfloat16"), "cpu")
    truth = {name: value for name, _, value in op.truth(problem, 1.0)}
    x, residual, weight, bias = (
        problem.leaves[name].detach() for name in ("x", "residual", "weight", "bias")
    )
    total = (x + residual).double()
    assert torch.equal(truth["total"], total)
    y = F.layer_norm(total, (64,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(truth["y"], y, rtol=1e-12, atol=1e-12)


def tampered_output(**tensors):
    y = OPS["bn"].normplug(**tensors, backend="auto")
    return y + 0.02 * y.detach().abs().mean()


def tampered_gradient(**tensors):
    y = OPS["bn"].normplug(**tensors, backend="auto")
    y.register_hook(lambda dy: 1.01 * dy)
    return y


def tampered_running_var(running_var, **tensors):
    y = OPS["bn"].normplug(running_var=running_var, **tensors, backend="auto")
    running_var.data[0] *= 1.001  # unseen by autograd
    return y


def tampered_count(num_batches_tracked, **tensors):
    return OPS["bn"].normplug(num_batches_tracked=None, **tensors, backend="auto")


def nan_output(**tensors):
    return OPS["bn"].normplug(**tensors, backend="auto") * torch.nan


@pytest.mark.parametrize(
    ("function", "output"),
    [
        (tampered_output, "y"),
        (tampered_gradient, "dx"),
        (tampered_running_var, "running_var"),
        (tampered_count, "num_batches_tracked"),
        (nan_output, "y"),
        (OPS["bn"].eager, "y"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wrong_provider_is_refused(function, output, dtype):
    case, op = Case("bn", "NCHW", (8, 5, 6, 7), dtype), OPS["bn"]
    problem = op.make(case, "cpu")
    yardstick = relative_errors(problem.outputs(op.eager), op.truth(problem, 1.0))
    outputs = problem.outputs(partial(function))
    message = f"tampered, bn NCHW 8x5x6x7 {dtype}: {output} is wrong: .* above "
    with pytest.raises(AssertionError, match=message):
        require_accurate(f"tampered, {case}", outputs, op.truth(problem, GOLDEN), yardstick)


def test_a_relu_that_lets_all_gradients_through_is_refused():
    case, op = SMALL._replace(op="bn_relu"), OPS["bn_relu"]
    problem = op.make(case, "cpu")
    yardstick = relative_errors(problem.outputs(op.eager), op.truth(problem, 1.0))

    def wrong(**tensors):
        pre = OPS["bn"].normplug(**tensors, backend="auto")
        return pre + (pre.relu() - pre).detach()

    with pytest.raises(AssertionError, match="dx is wrong"):
        require_accurate("wrong", problem.outputs(wrong), op.truth(problem, GOLDEN), yardstick)


def tampered(op, change):
    """The norm of ours, then a change of what it made by what it got."""
    return lambda **tensors: change(OPS[op].normplug(**tensors, backend="auto"), tensors)


def forget_the_gradient_of_the_total(made, tensors):
    return made[0], made[1].detach() + 0 * made[1]


def raise_the_running_mean(y, tensors):
    tensors["running_mean"].mul_(1.02)
    return y


def forget_the_statistics(x, weight, bias, **state):
    return OPS["ln"].normplug(x, weight, bias, backend="auto")


@pytest.mark.parametrize(
    ("op", "function", "output"),
    [
        ("ln", tampered("ln", lambda y, tensors: 1.02 * y), "y"),
        ("ln", tampered("ln", lambda y, t: y + (t["bias"] - t["bias"].detach())), "dbias"),
        ("ln", OPS["ln"].eager, "y"),
        ("ln_stats", tampered("ln_stats", raise_the_running_mean), "running_mean"),
        ("ln_stats", forget_the_statistics, "running_mean"),
        ("add_ln", tampered("add_ln", lambda both, t: (both[0], both[1] + 0.1)), "total"),
        ("add_ln", tampered("add_ln", forget_the_gradient_of_the_total), "dx"),
        (
            "bias_ln",
            tampered("bias_ln", lambda y, t: y + t["input_bias"] - t["input_bias"].detach()),
            "dinput_bias",
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wrong_layer_norm_is_refused(op, function, output, dtype):
    case, op = Case(op, "rows", (37, 64), dtype), OPS[op]
    problem = op.make(case, "cpu")
    yardstick = relative_errors(problem.outputs(op.eager), op.truth(problem, 1.0))
    with pytest.raises(AssertionError, match=f"{case}: {output} is wrong"):
        require_accurate(str(case), problem.outputs(function), op.truth(problem, GOLDEN), yardstick)


def test_an_output_that_nobody_knows_the_truth_of_is_refused():
    with pytest.raises(AssertionError, match="known of"):
        relative_errors({"y": torch.zeros(1)}, [])


def test_what_does_not_fit_is_skipped_aloud(capsys):
    with memory_for(SMALL):
        raise torch.OutOfMemoryError
    assert f"{SMALL}: skipped" in capsys.readouterr().err


def stopwatch(attempts):
    """One whose GPU is a function of the call and the lead."""
    made = object.__new__(Stopwatch)
    made._attempt = attempts
    return made


def test_a_repetition_that_the_gpu_waited_in_is_repeated_with_more_lead():
    leads = []

    def attempt(call, lead_us):
        leads.append(lead_us)
        return 5.0 if lead_us >= 400 else None

    assert stopwatch(attempt)._sample(None, 100.0) == 5.0
    assert leads == [100.0, 200.0, 400.0]
    with pytest.raises(RuntimeError, match="does the call synchronise"):
        stopwatch(lambda call, lead_us: None)._sample(None, 100.0)


def test_calls_take_turns_and_slow_ones_stop_sooner():
    called = []
    watch = stopwatch(lambda call, lead_us: called.append(call()) or 1.0)
    plans = {"a": MOST, "b": FEWEST}
    watch._plan = lambda call: (plans[call()], 1.0)
    samples = watch.gpu_us({"a": lambda: "a", "b": lambda: "b"})
    assert {name: len(found) for name, found in samples.items()} == plans
    assert called[: 4 * TURN] == (["a"] * TURN + ["b"] * TURN) * 2


def test_results_are_on_disk_after_each_row(tmp_path, monkeypatch):
    path = tmp_path / "made" / "rows.json"
    kept = results.Results(path, copy_gbps=3000.0)
    for count in (1, 2):
        kept.add({"us": float(count)})
        content = json.loads(path.read_text())
        assert content["copy_gbps"] == 3000.0
        assert [row["us"] for row in content["rows"]] == [1.0, 2.0][:count]
    assert {"device", "versions", "date"} <= content.keys()
    assert {"torch", "cuda", "python", "normplug"} <= content["versions"].keys()

    def cut_off(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        kept.add({"us": 3.0})
    assert json.loads(path.read_text()) == content


CONTENT = {
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

| op | direction | layout | shape | dtype | normplug | eager |
| --- | --- | --- | --- | --- | ---: | ---: |
| bn | F | NHWC | 128x256x56x56 | bfloat16 | 91% (150) | 21% (640) |
| bn_relu | F | NHWC | 32x64x14x14 | bfloat16 | - | 12% (10.0) |

Small shapes, microseconds a call: until the host is free again / in calls back to back, host and \
GPU overlapped:

| op | direction | layout | shape | dtype | eager |
| --- | --- | --- | --- | --- | ---: |
| bn_relu | F | NHWC | 32x64x14x14 | bfloat16 | 41.3 / 153 |
"""


def test_the_table_command(tmp_path, capsys):
    source, target = tmp_path / "rows.json", tmp_path / "docs" / "rows.md"
    source.write_text(json.dumps(CONTENT))
    main(["table", str(source)])
    assert capsys.readouterr().out == TABLE
    main(["table", str(source), "-o", str(target)])
    assert target.read_text() == TABLE
    with pytest.raises(SystemExit, match="nowhere.json cannot be read"):
        main(["table", "nowhere.json"])


ROWS = Case("ln", "rows", (37, 64), "float32")
LIGER = """
import torch.nn.functional as F

class LigerLayerNormFunction:
    @staticmethod
    def apply(x, weight, bias, eps):
        if x.shape[1] > 65536:
            raise RuntimeError("Cannot launch Triton kernel")
        return F.layer_norm(x, x.shape[1:], weight, bias, eps) {tampered}
"""
FLAGGEMS = """
import torch

def layer_norm(x, shape, weight, bias, eps):
    return torch.native_layer_norm(x, shape, weight, bias, eps)

def layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask):
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, bias, mask
    )
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make packages of given text, the rivals' names free before and after."""

    def forget():
        for name in list(sys.modules):
            if name.split(".")[0] in rivals.PACKAGES.values():
                del sys.modules[name]

    def packages(**modules):
        for name, text in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            info = tmp_path / f"{name.split('__')[0]}-9.8.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {name.split('__')[0]}\nVersion: 9.8\n")
        monkeypatch.syspath_prepend(tmp_path)

    forget()
    yield packages
    forget()


def test_rivals_that_are_there_are_measured(install):
    install(liger_kernel__ops__layer_norm=LIGER.format(tampered=""), flag_gems=FLAGGEMS)
    assert rivals.installed() == ("liger", "flaggems")
    assert results.provenance()["versions"].items() >= {
        ("liger_kernel", "9.8"),
        ("flag_gems", "9.8"),
    }
    for provider in rivals.PACKAGES:
        rows = rows_of(ROWS, [provider])
        assert [(row["provider"], row["direction"]) for row in rows] == [
            (provider, "F"),
            (provider, "F+B"),
        ]
    assert rows_of(ROWS._replace(op="add_ln"), rivals.PACKAGES) == []


@pytest.mark.parametrize(
    ("tampered", "shape", "reason"),
    [("+ 0.001", (37, 64), "y is wrong"), ("", (1, 70_000), "Cannot launch Triton kernel")],
)
def test_a_rival_that_is_wrong_or_fails_is_left_out_aloud(install, capsys, tampered, shape, reason):
    install(liger_kernel__ops__layer_norm=LIGER.format(tampered=tampered))
    rows = rows_of(ROWS._replace(shape=shape), ["liger", "eager"])
    assert [row["provider"] for row in rows] == ["eager", "eager"]
    error = capsys.readouterr().err
    assert error.startswith(f"{ROWS._replace(shape=shape)}: liger is left out: ")
    assert reason in error


def test_a_rival_that_is_not_there_is_asked_for_in_vain(monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    assert rivals.installed() == ()
    with pytest.raises(SystemExit, match="liger needs the package liger_kernel"):
        main(["kernels", "--provider", "liger"])


def speeds(providers=("normplug", "eager", "liger"), op="ln"):
    """Rows in which a provider's speed is its place times the width; liger knows no large one."""
    rows = [
        {
            "op": op,
            "shape": [4096, width],
            "direction": direction,
            "dtype": dtype,
            "provider": provider,
            "gbps": float(place * width),
        }
        for width in reversed(WIDTHS)
        for direction in ("F", "F+B")
        for dtype in ("bfloat16", "float32")
        for place, provider in enumerate(providers, 1)
        if provider != "liger" or width <= 65536
    ]
    other = {**rows[0], "shape": [512, 8192], "gbps": 1e9}
    return {**CONTENT, "rows": [*CONTENT["rows"], *rows, other]}


def test_the_plot_has_a_line_for_each_provider_in_each_panel():
    figure = speed_figure(speeds())
    assert [axes.get_title("left") for axes in figure.axes] == [
        "F, bfloat16",
        "F+B, bfloat16",
        "F, float32",
        "F+B, float32",
    ]
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert set(lines) == {"normplug", "eager", "liger", "copy"}
        for place, provider in enumerate(("normplug", "eager"), 1):
            assert list(lines[provider].get_xdata()) == list(WIDTHS)
            assert list(lines[provider].get_ydata()) == [place * width for width in WIDTHS]
        assert max(lines["liger"].get_xdata()) == 65536
        assert set(lines["copy"].get_ydata()) == {CONTENT["copy_gbps"]}
        assert axes.get_xscale() == "log"
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(lines)


def test_every_provider_has_a_look_of_its_own():
    assert set(STYLES) == {*PROVIDERS, *rivals.PACKAGES}
    assert len({style.colour for style in STYLES.values()}) == len(STYLES)


def test_the_plot_command(tmp_path):
    source, target = tmp_path / "rows.json", tmp_path / "made" / "speed.png"
    source.write_text(json.dumps(speeds()))
    main(["plot", str(source)])
    main(["plot", str(source), "-o", str(target)])
    for path in (source.with_suffix(".png"), target):
        assert path.read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps(speeds(op="ln_stats")))
    with pytest.raises(SystemExit, match=r"rows\.json: no row of ln with 4096 rows"):
        main(["plot", str(source)])
    with pytest.raises(SystemExit, match=r"nowhere\.json cannot be read"):
        main(["plot", "nowhere.json"])


def test_the_plot_command_without_matplotlib_says_what_to_install(tmp_path):
    source = tmp_path / "rows.json"
    source.write_text(json.dumps(speeds()))
    code = (
        "import sys; sys.modules['matplotlib'] = None; "
        f"from normplug.bench.__main__ import main; main(['plot', {str(source)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    message = done.stderr.strip()
    assert message.startswith("normplug.bench plot needs matplotlib")
    assert message.endswith('pip install "normplug[bench]"')


OTHER_KINDS = [
    ("a trace", '{"traceEvents": []}', "a trace, as `normplug.bench kernels --trace` writes"),
    ("a run", '{"arm": "golden", "seed": 0, "status": "failed"}', "the result of a run, as `train"),
    ("a list", "[{}, {}]", "holds a list. This command takes what `normplug.bench kernels`"),
    ("a number", "5", "holds no result of normplug. This command takes"),
    ("odd rows", '{"copy_gbps": 1, "rows": 5}', "holds no result of normplug"),
    ("half a row", json.dumps({**CONTENT, "rows": [{"op": "ln"}]}), "holds no result of normplug"),
    ("an empty file", " \n", "is empty."),
    ("no JSON", "{", "is not JSON: Expecting property name"),
    ("no text", b"\x89PNG", "is not JSON: it is not text in UTF-8."),
    *(
        (f"{name}_h100.json", (ROOT / "docs" / "results" / f"{name}_h100.json").read_bytes(), says)
        for name, says in [
            ("layer_norm_schemes", "holds no result of normplug"),
            ("cifar10_jpeg", "holds a list."),
        ]
    ),
]
OF_MODELS = [
    ("models_h100.json", "holds times of training steps, as `normplug.bench models` writes; `norm"),
    ("models_profile_h100.json", "a profile of training steps, as `normplug.bench models --prof"),
]


@pytest.mark.parametrize("name", ["plot", "table"])
@pytest.mark.parametrize(
    ("content", "says"), [kind[1:] for kind in OTHER_KINDS], ids=[kind[0] for kind in OTHER_KINDS]
)
def test_a_file_of_another_kind_is_named_in_one_line(tmp_path, name, content, says):
    source = tmp_path / "some.json"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as caught:
        main([name, str(source)])
    message = str(caught.value)
    assert message.startswith(f"normplug.bench {name}: {source} ")
    assert says in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(("name", "says"), OF_MODELS)
def test_times_of_models_are_no_plot_but_a_table(name, says, capsys):
    source = str(ROOT / "docs" / "results" / name)
    with pytest.raises(SystemExit, match=r"`normplug\.bench table` takes it\.") as caught:
        main(["plot", source])
    assert says in str(caught.value)
    main(["table", source])
    assert "| resnet50 |" in capsys.readouterr().out


def test_a_row_that_lacks_what_is_drawn_is_said_in_one_line(tmp_path):
    source = tmp_path / "rows.json"
    content = speeds()
    for row in content["rows"]:
        row.pop("gbps", None)
    source.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"normplug\.bench plot: .*rows\.json lacks 'gbps'\.$"):
        main(["plot", str(source)])


def test_the_trace_names_every_call(tmp_path):
    path = tmp_path / "made" / "trace.json"
    trace([SMALL], path, "cpu")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    for direction in ("F", "F+B"):
        assert names.count(f"{SMALL} {direction}") == 1


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "normplug.bench", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def test_without_a_gpu_it_says_so():
    done = command("kernels", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    message = "normplug.bench needs a CUDA device; torch.cuda.is_available() is False."
    assert done.stderr.splitlines()[-1] == message


@pytest.mark.gpu
def test_a_small_suite_from_end_to_end(tmp_path):
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "markdown", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    chosen = ["--suite", "small", "--only", "32x64x14x14", "--dtype", "bfloat16"]
    done = command("kernels", *chosen, "--op", "bn", "--op", "bn_add_relu", *options)
    assert done.returncode == 0, done.stderr
    content = json.loads(files["json"].read_text())
    assert content["device"] == torch.cuda.get_device_name()
    assert 100 < content["copy_gbps"] < 20_000
    combinations = {(r["op"], r["layout"], r["direction"], r["provider"]) for r in content["rows"]}
    for op in ("bn", "bn_add_relu"):
        for layout in ("NCHW", "NHWC"):
            for direction in ("F", "F+B"):
                for provider in ("normplug", "eager", "compile"):
                    assert (op, layout, direction, provider) in combinations
    for row in content["rows"]:
        assert row["provider"] in PROVIDERS
        assert row["shape"] == [32, 64, 14, 14]
        assert row["dtype"] == "bfloat16"
        assert 0 < row["us_p20"] <= row["us"] <= row["us_p80"] < 10_000
        assert 0 < row["host_us"] <= row["wall_us"]
        assert 0 < row["percent_of_copy"] < 200
        assert FEWEST <= row["repetitions"] <= MOST
        assert ("aten_backend" in row) == (row["provider"] == "eager")
    assert files["markdown"].read_text().count("32x64x14x14") == 2 * 8
    assert "bn NHWC 32x64x14x14 bfloat16 F+B" in files["trace"].read_text()
