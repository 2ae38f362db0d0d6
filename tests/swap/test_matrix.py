"""Each cell of the compatibility matrix: a tool works, or is refused with the reason expected.

Opacus replaces layers by their exact class, of which the matrix has a few; all are here.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import matrix
import normplug
from normplug import swap
from normplug.bench.rows import read_file


@pytest.fixture(autouse=True)
def _leave_no_compiled_code():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("column", matrix.COLUMNS)
@pytest.mark.parametrize("row", matrix.ROWS, ids=lambda row: row.run.__name__)
def test_a_tool_works_or_is_refused(row, column):
    if row.lacks:
        pytest.skip(f"needs {row.lacks}")
    outcome = matrix.outcome(row, column)
    if row.refused and (column == "golden" or (column == "standard" and row.always)):
        assert re.match("refused", outcome), outcome
        assert re.search(row.refused, outcome), outcome
    else:
        assert outcome == "works"


def test_the_page_is_that_of_the_committed_results_and_has_every_tool():
    docs = Path(matrix.__file__).parents[1] / "docs"
    rows = read_file(docs / "results" / "compatibility.json")
    assert matrix.page(rows) == (docs / "compatibility.md").read_text()
    assert [row["tool"] for row in rows] == [one.tool for one in matrix.ROWS]
    assert not any(row["commit"].endswith("-dirty") for row in rows)


def test_a_missing_package_is_named_in_the_tools_row():
    row = {"tool": "a tool", "lacks": "its package"}
    assert matrix.line_of(row) == "| a tool | not run: no its package | | |"
    row = {
        "tool": "b",
        "standard": "works",
        "golden": "refused: why. More.",
        "unswapped": "",
    }
    assert matrix.line_of(row) == "| b | works | refused: why |  |"


def test_opacus_fixes_every_class_whose_stock_class_it_knows():
    fix = pytest.importorskip("opacus.validators").ModuleValidator.fix
    # Registers with Opacus.
    plain = swap(nn.Sequential(nn.BatchNorm2d(4), nn.LayerNorm(4)), 0.3)
    fixed = fix(plain)
    assert [type(m) for m in fixed] == [nn.GroupNorm, normplug.LayerNorm]
    assert fixed[1].target_variance == 0.3
    assert not hasattr(fixed[1], "watched_mean")
    assert hasattr(plain[1], "watched_mean")  # `fix` works on a copy
    synchronised = swap(nn.Sequential(nn.BatchNorm2d(4)), sync=True)
    classes = normplug.BatchNorm1d, normplug.BatchNorm3d, normplug.SyncBatchNorm
    for model in (synchronised, *(nn.Sequential(ours(4)) for ours in classes)):
        assert type(fix(model)[0]) is nn.GroupNorm
    for ours, theirs in (
        ("BatchNorm1d", nn.InstanceNorm1d),
        ("BatchNorm2d", nn.InstanceNorm2d),
    ):
        assert type(fix(getattr(normplug, ours)(4), replace_bn_with_in=True)) is theirs
