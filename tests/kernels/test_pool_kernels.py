"""The kernels of BatchNorm with max pooling, in Triton's interpreter: see `test_interpreter`."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import interpreted
import routes
from accuracy import assert_same_bits
from kernel_cases import HALF
from normplug import functional, fuse, swap
from pool_cases import Pool, PoolCase, Stem, assert_accurate, make, run
from saved import saved_bytes

pytest.importorskip("triton")

from normplug._kernels.batch_norm import schedule  # noqa: E402

pytestmark = interpreted.MARKS

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
    PoolCase((2, 8, 13, 12), **HALF, kernel=(5, 5), stride=(5, 4), padding=(2, 1), ceil_mode=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_window_is_as_close_to_float64_as_torch(case):
    out = assert_accurate(case)
    assert out["y"].is_contiguous(memory_format=torch.channels_last)
    assert out["dx"].is_contiguous(memory_format=torch.channels_last)


def test_the_cases_cover_every_branch_of_the_schedule():
    shapes = []
    for case in CASES:
        n, c, _, width = case.shape
        columns = case.pool.size(*case.shape[2:])[1]
        shapes.append(schedule.pixels(n, columns, c, case.dtype.itemsize))
        shapes.append(schedule.pixels(n, -(-width // case.stride[1]), c, case.dtype.itemsize))
    assert {shape.slabs > 1 for shape in shapes} == {shape.even for shape in shapes}
    assert {shape.width > shape.bp for shape in shapes} == {True, False}
    assert any(shape.width > shape.bp and shape.width % shape.bp for shape in shapes)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs", [("x",), ("weight",), ("bias",), ("x", "bias")], ids="+".join)
def test_a_subset_of_the_gradients_can_be_requested(needs, training):
    out = assert_accurate(PoolCase(SHAPE, needs=needs, training=training))
    assert {name for name in out if name.startswith("d")} == {f"d{name}" for name in needs}


def test_the_gradient_may_have_another_layout():
    case = PoolCase(SHAPE)
    tensors = make(case)
    expected = run(case, tensors, "triton")
    for dy in (tensors.dy.contiguous(), torch.stack([tensors.dy] * 2, -1)[..., 0]):
        assert_same_bits(run(case, dataclasses.replace(tensors, dy=dy), "triton"), expected)


def test_the_first_of_equal_values_gets_the_gradient_and_none_at_or_below_zero():
    x = torch.zeros(1, 2, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
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


def test_nothing_is_saved_without_gradients(monkeypatch):
    case = PoolCase(SHAPE, needs=())
    launches = routes.watch_launches(monkeypatch)
    with torch.no_grad():
        run(case, make(case), "triton")
    forward = launches[-1]
    assert forward["peaks"] == forward["places"] == forward["x"]  # placeholders


def test_pooling_saves_the_input_and_a_value_and_a_byte_per_window():
    x = torch.randn(4, 16, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
    norm = partial(routes.batch_norm, x, weight=weight, bias=bias, pool=PAIRS)
    y = norm()
    assert saved_bytes(norm) == x.nbytes + y.nbytes + y.numel() + 4 * 4 * 16


def test_calls_of_one_shape_share_a_plan_and_its_launches(monkeypatch):
    made = routes.watch_compiled(monkeypatch)
    case = PoolCase((3, 4, 5, 6))
    run(case, make(case), "triton")
    assert len(made) == 4  # statistics, forward, sums, backward
    run(case, make(dataclasses.replace(case, seed=1)), "triton")
    assert len(made) == 4
    other = dataclasses.replace(case, stride=(1, 1))
    run(other, make(other), "triton")
    assert len(made) == 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": "contiguous"}, "not channels_last"),
        ({"kernel": (16, 16), "padding": (8, 8)}, "window"),
        ({"kernel": (3, 3), "padding": (2, 0)}, "window"),
        ({"kernel": (8, 3), "padding": (0, 0)}, "the output is empty"),
    ],
)
def test_what_the_kernels_cannot_pool_falls_back_to_torch(change, why):
    case = PoolCase(SHAPE, **change)
    x = torch.randn(SHAPE)
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    vectors = (None, None, torch.ones(5), torch.zeros(5))
    assert why in routes.refusal_to_pool(x, vectors, case.pool)

    def both():
        y = routes.batch_norm(x, *vectors, pool=case.pool)
        norm = functional.batch_norm(
            x, *vectors, True, mode="golden", activation="relu", backend="triton"
        )
        return y, F.max_pool2d(norm, case.kernel, case.stride, case.padding)

    if why == "not channels_last" or case.kernel[0] == 16:
        y, expected = both()
        assert torch.equal(y, expected)
        assert torch.equal(routes.bound_max_pool(x, vectors, case.pool), expected)
    else:
        with pytest.raises(RuntimeError):
            both()


def test_transforms_fall_back_to_torch():
    x = torch.randn(3, *SHAPE).movedim(2, -1).contiguous().movedim(-1, 2)
    pool = Pool((3, 3), (2, 2), (1, 1), False)
    norm = partial(routes.batch_norm, pool=pool)
    mapped = torch.vmap(partial(norm, backend="auto"))(x)
    torch.testing.assert_close(torch.stack([norm(one) for one in x]), mapped)


def test_a_fused_stem_runs_on_the_kernels_and_computes_what_the_unfused_one_does():
    torch.manual_seed(0)
    stem = swap(Stem().double(), backend="triton").to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 10).double().contiguous(memory_format=torch.channels_last)
    expected = stem(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(stem.parameters()))
    fused = fuse(stem)(x)
    assert routes.is_pooled_by_kernel(fused)
    torch.testing.assert_close(fused, expected)
    ours = torch.autograd.grad(fused.square().sum(), list(stem.parameters()))
    torch.testing.assert_close(ours, gradients)
    assert stem.bn.num_batches_tracked == 2
