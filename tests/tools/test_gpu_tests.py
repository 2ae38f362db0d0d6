"""The counts of the tests that need a GPU, where none runs."""

import json

import pytest

import gpu_tests
import tables
from normplug.bench.rows import read_file

REPORT = """<testsuites><testsuite>
<testcase classname="tests.fuse.test_models" name="test_a[x]" time="60.0"/>
<testcase classname="tests.fuse.test_beside" name="test_b" time="3.0"><skipped/></testcase>
<testcase classname="" name="tests.fuse.test_skipped" time="0.0"><skipped/></testcase>
<testcase classname="tests.test_gpu" name="test_c" time="6.0">{}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("inner", "failed"), [("", 0), ("<failure/>", 1), ("<error/>", 1)]
)
def test_each_folder_is_a_row_and_a_failure_is_the_exit_status(
    inner, failed, monkeypatch, tmp_path, capsys
):
    commands = []

    def run(command, variables):
        commands.append(command)
        return REPORT.format(inner)

    monkeypatch.setattr(gpu_tests, "run_pytest", run)
    monkeypatch.setattr(gpu_tests, "stamp", lambda gpu: {"device": "1 x GPU"})
    monkeypatch.setattr(gpu_tests, "ready", lambda device: None)
    monkeypatch.setenv("NORMPLUG_NATIVE", "0")
    path = tmp_path / "rows.json"
    words = ["--tests", "tests/fuse", "tests/test_gpu.py", "--jobs", "3"]
    assert gpu_tests.main([*words, "--json", str(path)]) == failed
    (command,) = commands
    assert " ".join(command[3:]) == "-q -m gpu -n 3 tests/fuse tests/test_gpu.py"
    fuse = {"passed": 1, "failed": 0, "skipped": 2, "minutes": 1.1}
    gpu = {"passed": 1 - failed, "failed": failed, "skipped": 0, "minutes": 0.1}
    alike = {"native": "Python", "device": "1 x GPU"}
    assert json.loads(path.read_text()) == [
        {"tests": "tests/fuse", **fuse, **alike},
        {"tests": "tests/test_gpu", **gpu, **alike},
    ]
    assert "tests/fuse" in capsys.readouterr().out


def test_the_counts_of_the_pages_are_those_of_the_results():
    rows = read_file(tables.DOCS / "results" / "gpu_tests_h200.json")
    passed = {row["tests"]: row["passed"] for row in rows}
    assert not any(row["failed"] for row in rows)
    (commit,) = {row["commit"][:7] for row in rows}
    native = " ".join((tables.DOCS / "native.md").read_text().split())
    assert (
        f"All {passed['tests/native']} GPU tests of the launcher passed on an H200"
        in native
    )
    assert f"at `{commit}`, [counts of all GPU tests" in native
    details = " ".join((tables.DOCS / "speed_details.md").read_text().split())
    assert f"{sum(passed.values())} tests that need a GPU passed on an H200" in details
