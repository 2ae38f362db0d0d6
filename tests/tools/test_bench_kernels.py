"""The bench of kernels: what is measured, next to whom, and how time is taken."""

import dataclasses
import json
import math
import re
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from normplug.bench import __main__ as bench
from normplug.bench import kernels, results, rivals
from normplug.bench.__main__ import main
from normplug.bench.accuracy import is_far, largest_difference
from normplug.bench.kernels import OPS, PROVIDERS, figures, line, measure, memory_for, own_cases
from normplug.bench.suites import (
    BATCH_NORMS,
    DTYPES,
    GROUP_NORMS,
    ROW_NORMS,
    SUITES,
    WITH_CPU,
    Case,
    layouts,
    select,
)
from normplug.bench.timing import (
    BUDGET_S,
    FEWEST,
    LEAD,
    LEAD_US,
    MOST,
    TURN,
    HostTime,
    Stopwatch,
    cpu_us,
)
from normplug.bench.trace import trace
from training import python

SMALL = Case("bn_add_relu", "NHWC", (8, 16, 4, 4), "bfloat16")
ROWS = Case("ln", "rows", (37, 64), "float32")


class Still:
    """A stopwatch that calls once and shows the same every time."""

    def gpu_us(self, calls):
        for call in calls.values():
            call()
        return {name: [10.0, 30.0, 20.0] for name in calls}

    def host_time(self, calls):
        return dict.fromkeys(calls, HostTime(7.0, 25.0))

    def copy_gbps(self):
        return 100.0


def rows_of(case, providers=("normplug", "eager")):
    return [row for rows in measure(case, providers, Still(), 100.0, "cpu") for row in rows]


def test_the_ops_are_those_of_the_suites():
    assert tuple(OPS) == (*BATCH_NORMS, *ROW_NORMS, *GROUP_NORMS)
    for cases in SUITES.values():
        assert len(set(cases)) == len(cases)
        assert {case.op for case in cases} <= set(OPS)
        assert {case.dtype for case in cases} <= set(DTYPES)
    assert {case.op for case in SUITES["full"]} == set(OPS)
    assert {case.op for case in (*SUITES["headline"], *SUITES["families"])} == set(OPS)
    assert set(WITH_CPU) <= set(SUITES)


def test_select_takes_what_fits_every_filter():
    chosen = select("small", ["bn", "bn_relu"], ["float32"], "NHWC 32x64x14x14")
    assert list(map(str, chosen)) == [f"{op} NHWC 32x64x14x14 float32" for op in ("bn", "bn_relu")]
    assert select("cudnn", None, None, "") == list(SUITES["cudnn"])


def test_figures():
    # 4e6 bytes in 2 us are 2e12 bytes a second.
    made = figures(4_000_000, [1.0, 2.0, 3.0, 2.0, 2.0, 9.0], copy_gbps=4000.0)
    assert made["us"] == 2.0
    assert (made["us_p20"], made["us_p80"]) == (2.0, 3.0)
    assert made["gbps"] == pytest.approx(2000.0)
    assert made["percent_of_copy"] == pytest.approx(50.0)


def test_a_row_says_what_was_measured():
    rows = rows_of(SMALL)
    expected = list(product(("F", "F+B"), ("normplug", "eager")))
    assert [(row["direction"], row["provider"]) for row in rows] == expected
    case = {**SMALL._asdict(), "shape": [8, 16, 4, 4], "floor_bytes": 3 * 8 * 16 * 4 * 4 * 2}
    assert rows[0].items() >= {**case, "us": 20.0, "host_us": 7.0, "wall_us": 25.0}.items()
    assert rows[1]["aten_backend"] == "Native"
    assert rows[1].keys() ^ rows[0].keys() == {"aten_backend", "difference"}


@pytest.mark.parametrize(("off", "far"), [(0.0, False), (1e-5, True)])
def test_a_row_says_how_far_it_is_from_torch_in_mode_standard(off, far, monkeypatch):
    stock = OPS["ln"]

    def shifted(mode="golden", **tensors):
        y = stock.normplug(mode=mode, **tensors)
        return y + off * y.detach().abs().max() * (mode == "standard")

    monkeypatch.setitem(OPS, "ln", dataclasses.replace(stock, normplug=shifted))
    rows = rows_of(ROWS, ["normplug"])
    assert [row["direction"] for row in rows] == ["F", "F+B"]
    for row in rows:
        assert row["difference"] == pytest.approx(off, rel=0.05)
        assert is_far(row) == far == (" (> 1e-07)" in line(ROWS, [row]))
        assert not is_far({**row, "dtype": "bfloat16"})


def test_the_largest_difference_counts_in_parts_of_the_largest_element():
    expected = {"y": torch.tensor([1.0, -4.0]), "dx": torch.zeros(2), "n": torch.tensor(3)}
    outputs = {"y": torch.tensor([1.5, -4.0]), "dx": torch.tensor([0.25, 0.0]), "n": expected["n"]}
    assert largest_difference(outputs, expected, ["y"]) == 0.125
    assert largest_difference(outputs, expected, expected) == 0.25
    outputs["n"] = torch.tensor(torch.nan)
    assert math.isnan(largest_difference(outputs, expected, expected))


def test_the_processor_is_timed_beside_the_gpu():
    rows = rows_of(SMALL._replace(dtype="float64"), ["eager", "cpu"])
    assert [row["provider"] for row in rows] == ["eager", "cpu"] * 2
    for row in rows[1::2]:
        assert 0 < row["us_p20"] <= row["us"] == row["host_us"] == row["wall_us"]
        assert "difference" not in row
    clock = iter(range(1000))
    assert len(cpu_us(lambda: None, lambda: next(clock))) == TURN


def test_a_provider_without_a_kernel_has_no_row(monkeypatch):
    def no_kernel(**tensors):
        raise NotImplementedError

    without = dataclasses.replace(OPS["bn_add_relu"], normplug=no_kernel)
    monkeypatch.setitem(OPS, "bn_add_relu", without)
    assert [row["provider"] for row in rows_of(SMALL)] == ["eager", "eager"]
    assert rows_of(SMALL, ["normplug-triton"]) == []


IMAGES = [(32, 33), (6, 33, 7), (6, 33, 4, 5), (3, 33, 2, 4, 5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        *product(BATCH_NORMS, IMAGES),
        *product(ROW_NORMS, [(1, 33), (37, 64), (300, 5)]),
        *product(["gn", "gn_silu"], [(6, 33, 7), (3, 64, 4, 5)]),
        *product(["in3d"], IMAGES[-1:]),
    ],
)
def test_normplug_is_found_right_on_any_shape(op, shape, dtype):
    for layout in layouts(op, shape):
        assert rows_of(Case(op, layout, shape, dtype), ["normplug"])


def test_channels_last_is_channels_last():
    problem = OPS["bn_add_relu"].make(SMALL, "cpu")
    for tensor in (problem.leaves["x"], problem.leaves["residual"], problem.gradients["y"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_what_does_not_fit_is_skipped_aloud(capsys):
    with memory_for(SMALL):
        raise torch.OutOfMemoryError
    assert f"{SMALL}: skipped" in capsys.readouterr().err


class FakeGpu:
    """A call returns the seconds that it takes; to queue it takes `needs` microseconds of sleep."""

    def __init__(self, needs=0.0):
        self.needs = needs
        self.now = 0.0
        self.leads = []
        self.called = []

    def time_us(self, call, lead_us):
        self.leads.append(lead_us)
        self.called.append(call())
        self.now += self.called[-1]
        return 5.0 if lead_us >= self.needs else None

    def back_to_back(self, call, count):
        return HostTime(25.0, 25.0)

    def samples(self, **calls):
        return Stopwatch(self, clock=lambda: self.now).gpu_us(calls)


def test_a_repetition_that_the_gpu_waited_in_is_repeated_with_more_lead():
    lead = LEAD_US + LEAD * 25.0
    gpu = FakeGpu(needs=4 * lead)
    assert set(gpu.samples(a=lambda: 0.1)["a"]) == {5.0}
    assert gpu.leads[:6] == [lead, 2 * lead, 4 * lead] * 2
    with pytest.raises(RuntimeError, match="does the call synchronise"):
        FakeGpu(needs=float("inf")).samples(a=lambda: 0.1)


def test_calls_take_turns_and_slow_ones_stop_sooner():
    gpu = FakeGpu()
    fast, slow = BUDGET_S / (2 * MOST), BUDGET_S / 2
    samples = gpu.samples(a=lambda: fast, b=lambda: slow)
    assert {name: len(found) for name, found in samples.items()} == {"a": MOST, "b": FEWEST}
    assert gpu.called[2 : 2 + 4 * TURN] == ([fast] * TURN + [slow] * TURN) * 2


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
import torch.nn.functional as F

layer_norm = torch.native_layer_norm
layer_norm_backward = torch.ops.aten.native_layer_norm_backward
rms_norm = F.rms_norm
"""
# As its signatures are in quack-kernels 0.6.5.
QUACK = """
import torch
import torch.nn.functional as F

def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None,
            eps=1e-6, prenorm=False, weight_offset=0.0):
    total = x if residual is None else x + residual
    y = F.rms_norm(total, x.shape[-1:], weight, eps)
    return (y, total) if prenorm else y

def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert weight.dtype == torch.float32, "Weight must be float32"
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, rstd[:, 0], mean[:, 0]

def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    others = (mean[:, None], rstd[:, None], weight, weight, [True] * 3)
    return torch.ops.aten.native_layer_norm_backward(dout, x, x.shape[-1:], *others)
"""
TIMM = """
import torch.nn.functional as F

fast_layer_norm, fast_rms_norm, fast_group_norm = F.layer_norm, F.rms_norm, F.group_norm
"""


FAKES = {
    "liger_kernel.ops.layer_norm": LIGER.format(tampered=""),
    "flag_gems": FLAGGEMS,
    "quack.rmsnorm": QUACK,
    "timm.layers.fast_norm": TIMM,
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make packages of given text, the rivals' names free before and as they were after."""
    known = {package.module: package for package in rivals.PACKAGES.values()}

    def ours():
        return [name for name in sys.modules if name.split(".")[0] in known]

    def packages(modules):
        for name, text in modules.items():
            path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(tmp_path).parents[:-1]:  # an installed one stays out
                tmp_path.joinpath(parent, "__init__.py").touch()
            path.write_text(text)
            distribution = known[name.split(".")[0]].distribution
            info = tmp_path / f"{distribution.replace('-', '_')}-9.8.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 9.8\n")
        monkeypatch.syspath_prepend(tmp_path)

    for name in ours():
        monkeypatch.delitem(sys.modules, name)
    yield packages
    for name in ours():
        del sys.modules[name]


RIVALS_OF = {
    "ln": ("liger", "flaggems", "quack", "timm"),
    "rms": ("flaggems", "quack", "timm"),
    "add_rms": ("quack",),
    "gn": ("timm",),
    "add_ln": (),
}


def test_rivals_that_are_there_are_measured(install):
    install(FAKES)
    assert rivals.missing(rivals.PACKAGES) == {}
    versions = results.provenance(*rivals.DISTRIBUTIONS)["versions"]
    assert {versions[distribution] for distribution in rivals.DISTRIBUTIONS} == {"9.8"}
    for op, providers in RIVALS_OF.items():
        case = ROWS._replace(op=op)
        if op == "gn":
            case = case._replace(shape=(2, 64, 3, 3), layout="NHWC")
        found = [(row["direction"], row["provider"]) for row in rows_of(case, rivals.PACKAGES)]
        assert found == list(product(("F", "F+B"), providers))


def test_cudnns_batch_norm_is_timed_with_what_follows_it(monkeypatch):
    def cudnn(x, weight, bias, mean, var, training, momentum, eps):
        return (F.batch_norm(x, mean, var, weight, bias, training, momentum, eps), None)

    monkeypatch.setattr(torch, "cudnn_batch_norm", cudnn)
    for op in BATCH_NORMS:
        rows = rows_of(SMALL._replace(op=op, dtype="float32"), ["cudnn"])
        assert [row["difference"] for row in rows] == [0, 0]
    assert {(case.layout, case.dtype) for case in SUITES["cudnn"]} == {("NHWC", "float16")}


@pytest.mark.parametrize(
    ("tampered", "shape", "reason"),
    [("+ 0.001", (37, 64), "y is wrong"), ("", (1, 70_000), "Cannot launch Triton kernel")],
)
def test_a_rival_that_is_wrong_or_fails_is_left_out_aloud(install, capsys, tampered, shape, reason):
    install({"liger_kernel.ops.layer_norm": LIGER.format(tampered=tampered)})
    rows = rows_of(ROWS._replace(shape=shape), ["liger", "eager"])
    assert [row["provider"] for row in rows] == ["eager", "eager"]
    error = capsys.readouterr().err
    assert error.startswith(f"{ROWS._replace(shape=shape)}: liger is left out: ")
    assert reason in error


def test_rivals_that_are_not_there_are_named_in_one_line_and_skipped(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(rivals, "find_spec", lambda name: name == "timm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "run", lambda cases, providers, json: asked.append(providers))
    main(["kernels"])
    assert asked == [[*PROVIDERS, "timm"]]
    missing = "liger (liger_kernel), flaggems (flag_gems), quack (quack-kernels)"
    line = f"normplug.bench: not installed, and left out: {missing}\n"
    assert capsys.readouterr().err == line
    main(["kernels", "--suite", "float32-float64"])
    assert asked[1] == [*PROVIDERS, "timm", "cpu"]
    monkeypatch.setenv("COLUMNS", "200")  # no line ends within the words
    with pytest.raises(SystemExit):
        main(["kernels", "--help"])
    default = "all that are installed; cpu only with --suite float32-float64"
    assert default in capsys.readouterr().out
    with pytest.raises(SystemExit, match="none of the providers is installed"):
        main(["kernels", "--provider", "liger"])


def test_shapes_of_ones_own_are_measured_in_place_of_a_suite(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "run", lambda cases, providers, json: asked.extend(cases))
    command = ["kernels", "--provider", "eager"]
    main([*command, "--shape", "512x8192", "--dtype", "float32", "--op", "ln", "--op", "bn"])
    main([*command, "--shape", "2x64x4x4", "--dtype", "float16", "--op", "gn"])
    assert list(map(str, asked)) == [
        "ln rows 512x8192 float32",
        "bn NC 512x8192 float32",
        "gn NCHW 2x64x4x4 float16",
        "gn NHWC 2x64x4x4 float16",
    ]
    fits = {case.op for case in own_cases([(4, 8)], None, None)}
    assert fits == {*BATCH_NORMS, *ROW_NORMS}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--shape", "512x"], "argument --shape: must be sizes of at least 1, .*; got '512x'"),
        (["--shape", "4x0"], "must be sizes of at least 1"),
        (["--shape", "4x8", "--suite", "small"], "--shape and --suite exclude each other"),
        (["--shape", "8", "--op", "ln"], r"ln takes \(\*rows, width\) .*; got --shape 8\."),
        (["--shape", "4x8", "--op", "gn"], r"gn takes \(N, C, \*space\) of 3 to 5 .*shape 4x8"),
        (["--shape", "4x8x2x2", "--op", "in3d"], r"in3d takes \(N, C, D, H, W\)"),
        (["--shape", "1x8x1", "--op", "bn"], "bn needs more than one value per channel"),
        (["--shape", "2x32x1", "--op", "gn"], "gn needs more than one value per group"),
        (["--shape", "9"], "takes .*; got --shape 9"),
        (["--shape", "4x8", "--only", "rows 5"], "no case of --shape passes the filters"),
    ],
)
def test_a_shape_that_cannot_be_measured_is_refused(options, reason, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["kernels", *options])
    said = str(caught.value) if caught.value.code != 2 else capsys.readouterr().err
    assert re.search(reason, said), said


TINY = {"rows": (3, 8), "NCHW": (2, 64, 2, 2), "NHWC": (2, 64, 2, 2)}


def test_the_families_are_measured_from_end_to_end(tmp_path, monkeypatch, capsys):
    cases = [
        case._replace(shape=(2, 4, 2, 2, 2) if case.op == "in3d" else TINY[case.layout])
        for case in SUITES["families"]
    ]
    monkeypatch.setitem(SUITES, "families", tuple(dict.fromkeys(cases)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "Stopwatch", Still)
    monkeypatch.setattr(kernels, "measure", lambda *others: measure(*others[:-1], "cpu"))
    monkeypatch.setattr(kernels.native, "build", lambda: None)
    monkeypatch.setattr(kernels.native, "status", lambda: "C++")
    json_file, page = tmp_path / "families.json", tmp_path / "families.md"
    providers = ["--provider", "normplug", "--provider", "eager"]
    command = ["kernels", "--suite", "families", *providers]
    main([*command, "--json", str(json_file), "--markdown", str(page)])
    assert "skipped" not in capsys.readouterr().err
    content = json.loads(json_file.read_text())
    assert content["native"] == "C++"
    rows = content["rows"]
    measured = [(r["op"], r["layout"], r["direction"], r["provider"]) for r in rows]
    ops = {(case.op, case.layout) for case in cases}
    assert {op for op, _ in ops} == {"rms", "add_rms", "gn", "gn_silu", "in3d"}
    assert set(measured) == {
        (*op, direction, name)
        for op, direction, name in product(ops, ("F", "F+B"), ("normplug", "eager"))
    }
    # Two tables of a line for each case and direction: times, and differences.
    assert len(page.read_text().splitlines()) == 11 + len(rows)


def test_the_trace_has_torchs_calls_beside_ours(tmp_path):
    path = tmp_path / "made" / "trace.json"
    trace([SMALL], path, "cpu")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    for direction, provider in product(("F", "F+B"), ("eager", "normplug")):
        assert names.count(f"{SMALL} {direction} {provider}") == 1


@pytest.mark.gpu
def test_a_small_suite_from_end_to_end(tmp_path):
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "markdown", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    chosen = ["--suite", "small", "--only", "32x64x14x14", "--dtype", "bfloat16"]
    ops = ["--op", "bn", "--op", "bn_add_relu"]
    done = python("-m", "normplug.bench", "kernels", *chosen, *ops, *options)
    assert done.returncode == 0, done.stderr
    content = json.loads(files["json"].read_text())
    assert content["device"] == torch.cuda.get_device_name()
    assert 100 < content["copy_gbps"] < 20_000
    combinations = {(r["op"], r["layout"], r["direction"], r["provider"]) for r in content["rows"]}
    providers = ("normplug", "eager", "compile")
    expected = product(("bn", "bn_add_relu"), ("NCHW", "NHWC"), ("F", "F+B"), providers)
    assert combinations >= set(expected)
    for row in content["rows"]:
        assert row["provider"] in (*PROVIDERS, *rivals.PACKAGES)
        assert row["shape"] == [32, 64, 14, 14]
        assert row["dtype"] == "bfloat16"
        assert 0 < row["us_p20"] <= row["us"] <= row["us_p80"] < 10_000
        assert 0 < row["host_us"] <= row["wall_us"]
        assert 0 < row["percent_of_copy"] < 200
        assert FEWEST <= row["repetitions"] <= MOST
        assert ("aten_backend" in row) == (row["provider"] == "eager")
    assert files["markdown"].read_text().count("32x64x14x14") == 3 * 8
    assert "bn NHWC 32x64x14x14 bfloat16 F+B normplug" in files["trace"].read_text()
