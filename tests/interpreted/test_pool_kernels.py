"""The kernels of BatchNorm with max pooling."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import routes
from accuracy import assert_same_bits
from batch_norm_cases import laid_out
from calls import saved_bytes
from kernel_cases import HALF
from normplug._ops.batch_norm import BatchNormSpec
from pool_cases import Pool, PoolCase, assert_accurate, make, run

SHAPE = (2, 5, 7, 9)
PAIRS = Pool((2, 2), (2, 2), (0, 0), False)
CASES = [
    PoolCase(SHAPE),
    PoolCase(SHAPE, torch.float64, offset=1e3),
    PoolCase(SHAPE, offset=1e3, mode="standard", momentum=None),
    PoolCase((2, 72, 8, 8), **HALF),
    PoolCase((1, 70, 5, 37), torch.bfloat16, affine="weight"),
    PoolCase(SHAPE, torch.float16, affine="bias", training=False),
    PoolCase((2, 16, 8, 6), affine="", kernel=(2, 2), padding=(0, 0), running=False),
    PoolCase((2, 3, 11, 8), kernel=(2, 3), stride=(3, 1), padding=(1, 0), ceil_mode=True),
    PoolCase((2, 3, 8, 10), torch.float64, stride=(1, 1), training=False),
    PoolCase((2, 3, 10, 9), torch.float64, kernel=(2, 2), stride=(3, 3), padding=(0, 1)),
    PoolCase((2, 3, 8, 8), stride=(2, 2), padding=(0, 0), ceil_mode=True, mode=4),
    PoolCase((1, 2, 3, 4), kernel=(5, 5), stride=(2, 3), padding=(2, 2)),
    PoolCase((3, 8, 4, 4), kernel=(4, 4), stride=(4, 4), padding=(0, 0)),
    PoolCase(
        (2, 8, 13, 12),
        **HALF,
        kernel=(5, 5),
        stride=(5, 4),
        padding=(2, 1),
        ceil_mode=True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_window_is_as_close_to_float64_as_torch(case):
    out = assert_accurate(case)
    assert out["y"].is_contiguous(memory_format=torch.channels_last)
    assert out["dx"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "needs", [("x",), ("weight",), ("bias",), ("x", "bias")], ids="+".join
)
def test_a_subset_of_the_gradients_can_be_requested(needs, training):
    out = assert_accurate(PoolCase(SHAPE, needs=needs, training=training))
    assert {name for name in out if name.startswith("d")} == {
        f"d{name}" for name in needs
    }


def test_the_gradient_may_have_another_layout():
    case = PoolCase(SHAPE)
    tensors = make(case)
    expected = run(case, tensors, "triton")
    for dy in (tensors.dy.contiguous(), torch.stack([tensors.dy] * 2, -1)[..., 0]):
        assert_same_bits(
            run(case, dataclasses.replace(tensors, dy=dy), "triton"), expected
        )


def test_the_first_of_equal_values_gets_the_gradient_and_none_at_or_below_zero():
    x = (
        torch.zeros(1, 2, 4, 4)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    for bias, expected in ((1.0, 1.0), (0.0, 0.0), (-1.0, 0.0)):
        given = (torch.zeros(2), torch.ones(2), torch.ones(2), torch.full((2,), bias))
        y = routes.batch_norm(x, *given, training=False, mode="standard", pool=PAIRS)
        assert torch.equal(y, torch.full_like(y, max(bias, 0.0)))
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert not dx[..., 1::2, :].any()
        assert not dx[..., 1::2].any()
        torch.testing.assert_close(dx[..., ::2, ::2], torch.full((1, 2, 2, 2), expected))


@pytest.mark.parametrize("training", [True, False])
def test_nan_and_infinity_propagate_as_in_torch(training):
    case = PoolCase((2, 5, 7, 9), training=training)
    tensors = make(case)
    clean = run(case, tensors, "triton")
    tensors.x[0, 1, 3, 3] = torch.nan
    tensors.x[1, 2, 2, 5] = torch.inf
    tensors.x[1, 3, 2, 5] = -torch.inf
    broken, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    assert broken["y"].isnan().any()
    torch.testing.assert_close(broken["y"], theirs["y"], equal_nan=True)
    if not training:
        torch.testing.assert_close(broken["dx"], theirs["dx"], equal_nan=True)
    for channel in (0, 4):
        assert torch.equal(broken["dx"][:, channel], clean["dx"][:, channel])


def test_pooling_saves_the_input_and_a_value_and_a_byte_per_window():
    x = (
        torch.randn(4, 16, 8, 8)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    weight, bias = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
    norm = partial(routes.batch_norm, x, weight=weight, bias=bias, pool=PAIRS)
    y = norm()
    assert saved_bytes(norm) == x.nbytes + y.nbytes + y.numel() + 4 * 4 * 16


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": "contiguous"}, "not channels_last"),
        ({"kernel": (16, 16), "padding": (8, 8)}, "window"),
        ({"kernel": (3, 3), "padding": (2, 0)}, None),
    ],
)
def test_what_the_kernels_cannot_pool_falls_back_to_torch(change, why):
    case = PoolCase(SHAPE, **change)
    x, vectors = (
        laid_out(torch.randn(SHAPE), case.layout),
        (None, None, *torch.rand(2, 5)),
    )
    spec = BatchNormSpec(True, 0.1, 1e-5, 1.0, "relu", case.pool)
    if why is not None:
        assert why in spec.refusal(routes.Tensors(x, None, *vectors[2:]))
    else:  # torch refuses the window
        with pytest.raises(RuntimeError):
            routes.batch_norm(x, *vectors, pool=case.pool)
        return
    norm = routes.batch_norm(x, *vectors, activation="relu")
    expected = F.max_pool2d(norm, case.kernel, case.stride, case.padding)
    assert torch.equal(routes.batch_norm(x, *vectors, pool=case.pool), expected)
