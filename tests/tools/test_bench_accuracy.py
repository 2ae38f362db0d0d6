"""The bench knows the exact results, and refuses to time what computes something else."""

import pytest
import torch
import torch.nn.functional as F

from normplug.bench.accuracy import relative_errors, require_accurate
from normplug.bench.kernels import OPS
from normplug.bench.suites import ROW_NORMS, Case

GOLDEN = (5**0.5 - 1) / 2
STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def test_the_truth_in_groups_of_channels_is_the_whole_truth(monkeypatch):
    case = Case("bn_add_relu", "NCHW", (6, 5, 4, 3), "float64")
    op = OPS[case.op]
    problem = op.make(case, "cpu")
    outputs = problem.outputs(op.eager)
    monkeypatch.setattr("normplug.bench.batch_norm.CHUNK_ELEMENTS", 2 * 6 * 4 * 3)
    errors = relative_errors(outputs, op.truth(problem, 1.0))
    assert set(errors) == {"y", "dx", "dweight", "dbias", "dresidual", *STATISTICS}
    assert max(errors.values()) < 1e-13


@pytest.mark.parametrize(
    ("op", "others"),
    [
        ("ln", set()),
        ("ln_stats", STATISTICS),
        ("add_ln", {"total", "dresidual"}),
        ("bias_ln", {"dinput_bias"}),
        ("rms", set()),
        ("add_rms", {"total", "dresidual"}),
    ],
)
def test_the_truth_of_norms_of_rows_in_groups_of_rows_is_that_of_autograd(op, others, monkeypatch):
    monkeypatch.setattr("normplug.bench.layer_norm.CHUNK_ELEMENTS", 3 * 7)
    problem = OPS[op].make(Case(op, "rows", (11, 7), "float64"), "cpu")
    truth = list(OPS[op].truth(problem, 1.0))
    assert [piece.where for piece in truth if piece.name == "y"] == [
        (slice(first, first + 3),) for first in (0, 3, 6, 9)
    ]
    errors = relative_errors(problem.outputs(OPS[op].eager), truth)
    assert set(errors) == {"y", *(f"d{name}" for name in problem.leaves)} | others
    assert max(errors.values()) < 1e-13


def test_the_total_is_rounded_before_it_is_normalised():
    op = OPS["add_ln"]
    problem = op.make(Case("add_ln", "rows", (8, 64), "bfloat16"), "cpu")
    truth = {name: value for name, _, value in op.truth(problem, 1.0)}
    names = ("x", "residual", "weight", "bias")
    x, residual, weight, bias = (problem.leaves[name].detach() for name in names)
    total = (x + residual).double()
    assert torch.equal(truth["total"], total)
    y = F.layer_norm(total, (64,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(truth["y"], y, rtol=1e-12, atol=1e-12)


def tampered(op, change):
    """Our norm, then a change of its result, which may read or change its arguments."""

    def function(**tensors):
        made = OPS[op].normplug(**tensors, backend="auto")
        return change(made, tensors)

    return function


def scale_the_gradient(y, tensors):
    y.register_hook(lambda dy: 1.01 * dy)
    return y


def scale(name, factor):
    """A change of a running statistic's first element that autograd does not see."""

    def change(y, tensors):
        tensors[name].data.view(-1)[0] *= factor
        return y

    return change


def forget_the_statistics(x, weight, bias, **state):
    return OPS["ln"].normplug(x, weight, bias, backend="auto")


REFUSED = [
    ("bn", tampered("bn", lambda y, t: y + 0.02 * y.detach().abs().mean()), "y"),
    ("bn", tampered("bn", scale_the_gradient), "dx"),
    ("bn", tampered("bn", scale("running_var", 1.001)), "running_var"),
    ("bn", tampered("bn", scale("num_batches_tracked", 0)), "num_batches_tracked"),
    ("bn", tampered("bn", lambda y, t: y * torch.nan), "y"),
    ("bn", OPS["bn"].eager, "y"),
    # ReLU's forward, and a backward that lets all gradients through.
    ("bn_relu", tampered("bn", lambda y, t: y + (y.relu() - y).detach()), "dx"),
    ("ln", tampered("ln", lambda y, t: 1.02 * y), "y"),
    ("ln", tampered("ln", lambda y, t: y + (t["bias"] - t["bias"].detach())), "dbias"),
    ("ln", OPS["ln"].eager, "y"),
    ("ln_stats", tampered("ln_stats", scale("running_mean", 1.02)), "running_mean"),
    ("ln_stats", forget_the_statistics, "running_mean"),
    ("add_ln", tampered("add_ln", lambda both, t: (both[0], both[1] + 0.1)), "total"),
    ("add_ln", tampered("add_ln", lambda both, t: (both[0], both[1].detach() + 0 * both[1])), "dx"),
    (
        "bias_ln",
        tampered("bias_ln", lambda y, t: y + t["input_bias"] - t["input_bias"].detach()),
        "dinput_bias",
    ),
]


@pytest.mark.parametrize(("op", "function", "output"), REFUSED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wrong_result_is_refused(op, function, output, dtype):
    where = ("rows", (37, 64)) if op in ROW_NORMS else ("NCHW", (8, 5, 6, 7))
    case, op = Case(op, *where, dtype), OPS[op]
    problem = op.make(case, "cpu")
    yardstick = relative_errors(problem.outputs(op.eager), op.truth(problem, 1.0))
    outputs = problem.outputs(function)
    with pytest.raises(AssertionError, match=f"tampered, {case}: {output} is wrong: .* above "):
        require_accurate(f"tampered, {case}", outputs, op.truth(problem, GOLDEN), yardstick)


def test_an_output_that_nobody_knows_the_truth_of_is_refused():
    with pytest.raises(AssertionError, match="the truth has"):
        relative_errors({"y": torch.zeros(1)}, [])
