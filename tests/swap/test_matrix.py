"""Each cell of the compatibility matrix: a tool works, or is refused with the reason expected.

Opacus replaces layers by their exact class, of which the matrix has a few; all are here.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import matrix
import normplug
from normplug import swap


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
    if column == "swapped" and row.refused:
        assert re.match("refused", outcome), outcome
        assert re.search(row.refused, outcome), outcome
    else:
        assert outcome == "works"


def test_a_tool_that_drops_the_factor_is_distinguished_from_one_that_works():
    def rebuild(model):
        stock = nn.LayerNorm(32)
        stock.load_state_dict({k: model.norm.state_dict()[k] for k in ("weight", "bias")})
        model.norm = stock
        return matrix.evaluate(model)

    def read(model):
        return F.layer_norm(torch.ones(2, 32).cumsum(1), (32,), model.norm.weight)

    rebuilding = matrix.Row("rebuilds", rebuild, (), "", 1e-4)
    reading = matrix.Row("reads", read, (), "", 1e-4)
    assert matrix.outcome(rebuilding, "swapped").startswith("refused by check: norm: swapped in")
    assert matrix.outcome(reading, "swapped").startswith("silently wrong: Tensor-likes are not")
    assert {matrix.outcome(row, "unswapped") for row in (rebuilding, reading)} == {"works"}


def test_opacus_fixes_every_class_whose_stock_class_it_knows():
    fix = pytest.importorskip("opacus.validators").ModuleValidator.fix
    plain = swap(nn.Sequential(nn.BatchNorm2d(4), nn.LayerNorm(4)), 0.3)  # registers with Opacus
    fixed = fix(plain)
    assert [type(m) for m in fixed] == [nn.GroupNorm, normplug.LayerNorm]
    assert fixed[1].target_variance == 0.3
    assert not hasattr(fixed[1], "watched_mean")
    assert hasattr(plain[1], "watched_mean")  # `fix` works on a copy
    synchronised = swap(nn.Sequential(nn.BatchNorm2d(4)), sync=True)
    classes = normplug.BatchNorm1d, normplug.BatchNorm3d, normplug.SyncBatchNorm
    for model in (synchronised, *(nn.Sequential(ours(4)) for ours in classes)):
        assert type(fix(model)[0]) is nn.GroupNorm
    for ours, theirs in (("BatchNorm1d", nn.InstanceNorm1d), ("BatchNorm2d", nn.InstanceNorm2d)):
        assert type(fix(getattr(normplug, ours)(4), replace_bn_with_in=True)) is theirs
