"""Each cell of the compatibility matrix: a tool works, or is refused with the reason expected."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import matrix


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
