"""The bench of single calls: what is called, how often, and what is reported."""

import contextlib
import json

import pytest
import torch

from normplug.bench import host, native
from normplug.bench.__main__ import main
from normplug.bench.host import CASES, EAGER, OURS, PYTHON, REPEATS, WARM_UPS
from normplug.bench.suites import Case
from normplug.bench.timing import HostTime

SMALL = {
    case.op: case
    for case in (
        Case("ln", "rows", (4, 8), "float32"),
        Case("add_ln", "rows", (4, 8), "bfloat16"),
        Case("rms", "rows", (4, 8), "float32"),
        Case("add_rms", "rows", (4, 8), "bfloat16"),
        Case("bn", "NC", (8, 4), "float32"),
        Case("bn_relu", "NHWC", (2, 3, 4, 4), "bfloat16"),
        Case("gn_silu", "NHWC", (2, 32, 4, 4), "bfloat16"),
    )
}


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Nothing is built; when calls are sent the Python way, and when no longer."""
    entered = []

    @contextlib.contextmanager
    def python_way():
        entered.append(True)
        yield
        entered.append(False)

    monkeypatch.setattr(native, "build", lambda: None)
    monkeypatch.setattr(native, "status", lambda: "C++")
    monkeypatch.setattr(native, "python_way", python_way)
    return entered


@pytest.mark.parametrize("op", host.OPS)
def test_every_provider_is_called_in_both_directions(op, pauses):
    case = SMALL[op]
    f, both = host.measure(case, [EAGER, OURS, PYTHON], 2, "cpu")
    for rows, direction in ((f, "F"), (both, "F+B")):
        assert [row["provider"] for row in rows] == [EAGER, OURS, PYTHON]
        for row in rows:
            facts = {**case._asdict(), "shape": list(case.shape), "direction": direction}
            assert row.items() >= {**facts, "calls": 2}.items()
            assert 0 < row["host_us"] <= row["wall_us"] <= row["median_wall_us"]
    # Once to compare, then in each direction a warm-up, a look at the pace, and the repeats.
    assert pauses == [True, False] * (1 + 2 * (2 + REPEATS))


@pytest.mark.parametrize("op", host.OPS)
def test_calls_compute_the_same_in_training_and_f_makes_no_graph(op):
    ways = host.prepared(SMALL[op], [EAGER, OURS], "cpu")
    with ways["F"][OURS].context():
        assert not any(output.requires_grad for output in ways["F"][OURS].call())
    ours, theirs = (ways["F+B"][name].call() for name in (OURS, EAGER))
    compared = 2 * host.OPS[op].inputs
    assert len(ours) - compared == (1 if "rms" in op else 2)  # the gradients of parameters
    for mine, other in zip(ours[:compared], theirs[:compared], strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)
    with pytest.raises(AssertionError, match="a relative error of 1, above"):
        host.require_near("x", (2 * theirs[0].detach(),), theirs[:1])


def test_the_cases_are_those_of_the_page():
    assert len(CASES) == len(set(CASES)) == 27
    assert {case.op for case in CASES} == set(host.OPS)
    assert {case.dtype for case in CASES if case.shape == (32, 128)} == {"float32"}
    assert {case.dtype for case in CASES if case.shape != (32, 128)} == {"bfloat16"}


def test_a_repeat_has_the_calls_that_fit_its_time_and_the_best_repeat_counts():
    class Way:
        def __init__(self, us):
            self.us, self.counts = us, []

        def repeat(self, count):
            self.counts.append(count)
            # The third repeat is the fastest, the others are equal.
            wall = self.us / 2 if len(self.counts) == 2 + 3 else self.us
            return HostTime(wall / 4, wall)

    ways = {"fast": Way(1.0), "slow": Way(1000.0), "endless": Way(1e7)}
    found = host.in_turns(ways, 2000)
    calls = {"fast": 2000, "slow": 100, "endless": WARM_UPS}
    assert {name: row["calls"] for name, row in found.items()} == calls
    for name, way in ways.items():
        assert way.counts == [WARM_UPS] * 2 + [calls[name]] * REPEATS
        times = {"wall_us": way.us / 2, "median_wall_us": way.us, "host_us": way.us / 8}
        assert found[name].items() >= times.items()


def test_the_command_prints_a_table_with_ratios_and_writes_the_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "CASES", tuple(SMALL.values()))
    path = tmp_path / "host.json"
    main(["host", "--calls", "2", "--only", "ln rows", "--out", str(path)])
    shown = capsys.readouterr()
    content = json.loads(path.read_text())
    assert [row["op"] for row in content["rows"]] == ["ln"] * 6 + ["add_ln"] * 6
    assert content["native"] == "C++"

    for row, us in zip(content["rows"], (10.0, 20.0, 40.0, 400.0, 100.0, 50.0) * 2, strict=True):
        row["wall_us"] = us
    path.write_text(json.dumps(content))
    main(["table", str(path)])
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line for line in lines if line.startswith("| op |"))
    assert header == (
        "| op | layout | shape | dtype | direction | eager | normplug | normplug-python "
        "| normplug over eager | normplug-python over eager |"
    )
    assert header in shown.out.splitlines()
    assert "| ln | rows | 4x8 | float32 | F | 10.0 | 20.0 | 40.0 | 0.50x | 0.25x |" in lines
    assert "| add_ln | rows | 4x8 | bfloat16 | F+B | 400 | 100 | 50.0 | 4.00x | 8.00x |" in lines


def test_the_file_of_a_single_case_has_the_path_that_its_calls_took(tmp_path, monkeypatch):
    path, ways = tmp_path / "host.json", ["Python"]

    def measure(*others):
        ways.append("C++")  # the first call loads the library
        yield [{"direction": "F", "provider": OURS, "wall_us": 1.0}]

    monkeypatch.setattr(host, "measure", measure)
    monkeypatch.setattr(native, "status", lambda: ways[-1])
    host.run([SMALL["ln"]], [OURS], 2, path, "cpu")
    assert json.loads(path.read_text())["native"] == "C++"


def test_a_filter_that_nothing_passes_is_refused():
    with pytest.raises(SystemExit, match="no case has 'lrn' in its name"):
        main(["host", "--only", "lrn"])
