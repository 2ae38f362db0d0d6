"""The gate on what a change costs: Python calls of a step, and tokens of the code."""

import json

import pytest
import torch
from torch import nn

import budget


def test_the_package_stays_within_its_limits():
    # Other versions of torch take other ways in a step.
    limits = json.loads(budget.LIMITS.read_text())
    assert budget.over({"tokens": sum(budget.tokens().values())}, limits) == []
    if torch.__version__ >= "2.14":
        assert budget.over(budget.counts(), limits) == []


def test_the_calls_are_those_of_functions_of_the_package():
    class Twice(nn.Linear):
        def forward(self, x):
            return more(super().forward(x))

    def counted(file):
        scope = {}
        exec(compile("def more(x): return x", str(file), "exec"), scope)
        nonlocal more
        more = scope["more"]
        model, batch = budget.rows(nn.LayerNorm)
        return budget.calls(nn.Sequential(Twice(8, 8), model), batch)

    more = None
    assert counted(budget.PACKAGE / "more.py") == counted("other.py") + 1


def test_over_names_the_counts_that_are_above_their_limits():
    assert budget.over({"calls": 102, "tokens": 90}, {"calls": 100, "tokens": 100}) == []
    found = budget.over({"calls": 103, "tokens": 90}, {"calls": 100, "tokens": 100})
    assert found == ["calls: 103, which is 3.0% above 100"]


def test_the_command_ends_with_1_above_a_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(budget, "LIMITS", tmp_path / "budget.json")
    monkeypatch.setattr(budget, "CASES", {})
    budget.main(["--write"])
    assert "limit" in capsys.readouterr().out
    (tmp_path / "budget.json").write_text('{"tokens": 10}')
    with pytest.raises(SystemExit, match="above 10"):
        budget.main([])
