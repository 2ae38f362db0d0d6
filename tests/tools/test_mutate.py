"""`benchmarks/mutate.py` on a small package with a test of its own."""

import subprocess

import pytest

import mutate
from mutations import MUTATIONS, Mutation

pytest.importorskip("xdist")  # the script runs pytest in one process

SOURCE = "def largest(values):\n    return max(values, default=0)\n"
TEST = """
import os
from largest import largest

def test_the_largest_value_is_returned():
    assert largest([1, 2]) == 2

def test_the_environment_is_set():
    assert "LARGEST" not in os.environ or largest([]) == 0
"""
VALUES = "test_largest.py::test_the_largest_value_is_returned"
ENVIRONMENT = "test_largest.py::test_the_environment_is_set"
KILLED = Mutation("the smallest", "largest.py", "max(", "min(", (VALUES,))
SURVIVED = Mutation("another default", "largest.py", "default=0", "default=1", (VALUES,))
STALE = Mutation("no such text", "largest.py", "sum(", "max(", (VALUES,))
TWICE = Mutation("a text that is there twice", "largest.py", "values", "items", (VALUES,))
UNCLEAR = Mutation("a broken import", "largest.py", "def ", "deff ", (VALUES,))
VARIABLE = SURVIVED._replace(
    name="a variable", tests=(ENVIRONMENT,), environment={"LARGEST": "1"}
)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    # Plugins that pytest would find by itself take longer to import than the tests.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    files = {"largest.py": SOURCE, "test_largest.py": TEST, "pytest.ini": "[pytest]\n"}
    for name, text in {**files, ".gitignore": "ignored\n", "ignored": ""}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def results(printed):
    """The result of each mutation in a printed table."""
    names = [each.name for each in (KILLED, SURVIVED, STALE, TWICE, UNCLEAR, VARIABLE)]
    lines = [line for line in printed.splitlines() if "largest.py" in line]
    rows = [line.split("largest.py") for line in lines if line.startswith(tuple(names))]
    return {name.strip(): rest.split()[0] for name, rest in rows}


def test_a_mutation_is_killed_only_if_its_tests_fail(checkout, capsys):
    mutations = (KILLED, SURVIVED, STALE, TWICE, UNCLEAR, VARIABLE)
    assert mutate.main(["--jobs", "2"], mutations, checkout) == 1
    printed = capsys.readouterr().out
    assert results(printed) == {
        "the smallest": "killed",
        "another default": "survived",
        "no such text": "stale",
        "a text that is there twice": "stale",
        "a broken import": "unclear",
        "a variable": "killed",
    }
    assert "SyntaxError" in printed  # why it is unclear
    assert "6 mutations: 2 killed, 1 survived, 2 stale, 1 unclear" in printed
    assert (checkout / "largest.py").read_text() == SOURCE


def test_words_choose_mutations_and_the_status_is_0_if_all_are_killed(checkout, capsys):
    assert (
        mutate.main(["smallest", "variable"], (KILLED, SURVIVED, VARIABLE), checkout) == 0
    )
    assert results(capsys.readouterr().out) == {
        "the smallest": "killed",
        "a variable": "killed",
    }
    assert mutate.main(["nonsense"], (KILLED,), checkout) == 1
    assert "no mutation is named nonsense" in capsys.readouterr().err


def test_tests_that_fail_without_a_mutation_kill_none(checkout, capsys):
    (checkout / "largest.py").write_text(SOURCE.replace("max", "min"))
    other = KILLED._replace(old="min(", new="sum(")
    assert mutate.main([], (other,), checkout) == 1
    printed = capsys.readouterr().out
    assert "these tests fail without a mutation" in printed
    assert results(printed) == {}


def test_the_tests_run_in_a_copy_without_ignored_files(checkout, tmp_path_factory):
    target = tmp_path_factory.mktemp("copy")
    mutate.copy_of(checkout, target)
    names = sorted(path.name for path in target.iterdir())
    assert names == [".gitignore", "largest.py", "pytest.ini", "test_largest.py"]


def test_tests_that_do_not_end_kill_a_mutation(checkout, monkeypatch):
    monkeypatch.setattr(mutate, "LIMIT", 0.01)
    assert mutate.outcome_of(SURVIVED, checkout).result == "killed"


def test_the_list_names_each_mutation_and_those_that_are_stale(checkout, capsys):
    assert mutate.main(["--list"], (KILLED, SURVIVED), checkout) == 0
    assert mutate.main(["--list"], (KILLED, STALE), checkout) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "stale" in line]


def test_each_mutation_changes_a_file_and_has_a_name_of_its_own():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))
    for mutation in MUTATIONS:
        assert mutation.old != mutation.new, mutation.name
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            path, _, name = test.partition("::")
            source = (mutate.CHECKOUT / path).read_text()
            assert f"def {name.partition('[')[0]}" in source, mutation.name
