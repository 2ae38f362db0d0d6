"""The counts of the tests that need a GPU, where none runs."""

import json

import pytest

import gpu_tests

COUNTS = {
    "tests/fuse": {"passed": 3, "failed": 0, "skipped": 1, "minutes": 0.5},
    "tests/docs": {"passed": 0, "failed": 0, "skipped": 0, "minutes": 0.1},
    "tests/kernels": {"passed": 5, "failed": 2, "skipped": 0, "minutes": 1.0},
}


@pytest.fixture
def commands(monkeypatch):
    """The commands of pytest, which are not run."""
    ran = []

    def run(command, variables):
        ran.append(command)
        return COUNTS[command[-1]]

    monkeypatch.setattr(gpu_tests, "run_pytest", run)
    monkeypatch.setattr(gpu_tests, "stamp", lambda gpu: {"device": "1 x GPU"})
    monkeypatch.setattr(gpu_tests, "ready", lambda device: None)
    return ran


@pytest.mark.parametrize(
    ("tests", "status"),
    [(["tests/fuse", "tests/docs"], 0), (["tests/fuse", "tests/kernels"], 1)],
)
def test_each_folder_with_such_tests_is_a_row_and_a_failure_is_the_exit_status(
    tests, status, commands, tmp_path, capsys
):
    path = tmp_path / "rows.json"
    words = ["--tests", *tests, "--jobs", "3", "--json", str(path)]
    assert gpu_tests.main(words) == status
    assert [command[-1] for command in commands] == tests
    assert all(command[3:7] == ["-q", "-m", "gpu", "-n"] for command in commands)
    rows = json.loads(path.read_text())
    kept = [name for name in tests if name != "tests/docs"]
    assert [row["tests"] for row in rows] == kept
    for row in rows:
        assert row.items() >= COUNTS[row["tests"]].items()
        assert row["device"] == "1 x GPU"
    assert "tests/fuse" in capsys.readouterr().out


def test_all_tests_are_in_one_of_the_folders():
    folders = gpu_tests.folders()
    assert {"tests/kernels", "tests/fuse", "tests/test_gpu.py"} <= {*folders}
    tests = gpu_tests.CHECKOUT / "tests"
    for module in tests.rglob("test_*.py"):
        name = str(module.relative_to(gpu_tests.CHECKOUT))
        assert sum(name == each or name.startswith(f"{each}/") for each in folders) == 1
