import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from normplug.bench import results
from normplug.bench.__main__ import main
from normplug.bench.accuracy import relative_errors, require_accurate
from normplug.bench.kernels import OPS, PROVIDERS, figures, floor_bytes, measure, memory_for
from normplug.bench.suites import BATCH_NORMS, DTYPES, SUITES, Case, layouts, select
from normplug.bench.timing import FEWEST, MOST, TURN, HostTime, Stopwatch
from normplug.bench.trace import trace

ROOT = Path(__file__).parents[1]
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
    assert tuple(OPS) == BATCH_NORMS
    for cases in SUITES.values():
        assert len(set(cases)) == len(cases)
        assert {case.op for case in cases} == set(BATCH_NORMS)
        assert {case.dtype for case in cases} <= set(DTYPES)


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


@pytest.mark.parametrize(("op", "passes"), [("bn", (2, 5)), ("bn_relu", (2, 5)), (None, (3, 7))])
def test_floors(op, passes):
    op = op or "bn_add_relu"
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


def test_channels_last_is_channels_last():
    problem = OPS["bn_add_relu"].make(SMALL, "cpu")
    for tensor in (problem.leaves["x"], problem.leaves["residual"], problem.dy):
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
    kept = results.Results(path, 3000.0)
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
