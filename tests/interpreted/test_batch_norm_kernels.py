"""BatchNorm's kernels. A GPU runs programs in any order: `test_batch_norm_kernels_gpu`."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import routes
from batch_norm_cases import LAYOUTS, laid_out
from calls import DTYPES, paired
from kernel_cases import HALF, Case, assert_accurate, check_recomputed, make, run
from normplug import functional, reference


def in_tiles(shape):
    """Many tiles per channel, the last one partial, each written soon after it was read."""
    tiles = -(-shape.n * shape.hw // 128)
    return dataclasses.replace(
        shape, block=128, warps=1, tiles_a_channel=tiles, lag=tiles + 1
    )


def phased(rows_a_tile, rows_an_item, group=1, head=1):
    """Items that gather and items that write; groups of slabs overlap by a head of items."""

    def change(shape):
        bt = min(rows_a_tile, 2)
        cut = {
            "u": rows_a_tile // bt,
            "gather_rows": rows_an_item,
            "group": group,
            "head": head,
        }
        return dataclasses.replace(shape, bt=bt, programs=0, **cut)

    return change


def solo(rows_a_tile):
    """One program per slab, which reads its rows twice."""

    def change(shape):
        bt = min(rows_a_tile, 2)
        return dataclasses.replace(
            shape, bt=bt, u=rows_a_tile // bt, programs=1, gather_rows=0
        )

    return change


def setup_of(shape, layout="contiguous", change=lambda shape: shape):
    """A case, and a change to the schedule chosen for it."""
    return Case(shape, layout=layout), {"geometry": change}


FEW_ITEMS = {
    "planes": setup_of((3, 3, 11, 13)),
    "planes in tiles": setup_of((2, 2, 11, 13), change=in_tiles),
    "rows": setup_of((37, 19)),
    "rows, phased": setup_of((7, 9), change=phased(2, 4)),
    "rows, solo": setup_of((7, 9), change=solo(2)),
    "channels_last": setup_of((3, 19, 2, 4), "channels_last"),
    "small planes": setup_of((5, 5, 7, 7), change=solo(2)),
    "small planes, phased": setup_of((3, 5, 6, 7), change=phased(1, 2)),
}
MANY_ITEMS = {
    "rows, in groups": setup_of((7, 17), change=phased(2, 4, group=2, head=3)),
    "rows, in a group": setup_of((17, 33), change=phased(2, 2, group=8, head=5)),
    "rows, without a head": setup_of((7, 17), change=phased(1, 7, group=2, head=0)),
    "rows, many items": setup_of((17, 5), change=phased(2, 2)),
    "small planes, many items": setup_of((9, 3, 2, 3), change=phased(2, 1)),
}
SETUPS = FEW_ITEMS | MANY_ITEMS
EVERY_SETUP = pytest.mark.parametrize("setup", FEW_ITEMS)
SOME_SETUPS = pytest.mark.parametrize(
    "setup", ["planes in tiles", "rows, phased", "small planes"]
)
VARIANTS = [
    {"dtype": torch.float16, "activation": "relu", "affine": "bias", "running": False},
    {
        "dtype": torch.float64,
        "activation": "gelu",
        "residual": "strided",
        "momentum": None,
    },
    {"dtype": torch.float64, "training": False, "activation": "silu", "eps": 0.1},
    {"activation": "relu", "residual": "contiguous", "offset": 1e3, "momentum": 1.0},
    {"training": False, "affine": "", "mode": "standard"},
    {**HALF, "activation": "silu", "affine": "weight", "offset": 1e3, "mode": 4},
    {**HALF, "activation": "relu", "residual": "contiguous", "training": False},
    {"activation": "relu6", "residual": "contiguous", "mode": 20},
    {**HALF, "activation": "hardswish", "mode": 10},
    {"activation": ("leaky_relu", 0.2), "residual": "contiguous", "offset": 1e3},
]


@paired(FEW_ITEMS, VARIANTS, 0, 3, 6)
def test_every_setup_is_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(prepared(setup, **options))


@SOME_SETUPS
def test_64_bit_offsets_are_accurate(setup, prepared, monkeypatch):
    routes.use_64_bit_offsets(monkeypatch)
    assert_accurate(prepared(setup, activation="relu", residual="contiguous"))


@paired(FEW_ITEMS, VARIANTS, 0, 3)
def test_the_backward_can_recompute_the_output(setup, options, prepared):
    case = prepared(setup, **options)
    check_recomputed(dataclasses.replace(case, residual=case.residual and case.layout))


NEEDS = [("x",), ("weight",), ("bias",), ("residual",), ("x", "residual")]


@SOME_SETUPS
@pytest.mark.parametrize("needs", NEEDS, ids="+".join)
@pytest.mark.parametrize(("training", "activation"), [(True, "relu"), (False, "gelu")])
def test_a_subset_of_the_gradients_can_be_requested(
    setup, needs, training, activation, prepared
):
    options = {"training": training, "activation": activation, "residual": "contiguous"}
    out = assert_accurate(prepared(setup, needs=needs, **options))
    assert {name for name in out if name.startswith("d")} == {
        f"d{name}" for name in needs
    }


@pytest.mark.parametrize(
    ("layout", "other", "activation"),
    [
        *itertools.product(
            LAYOUTS, ("contiguous", "channels_last", "expanded"), ["relu"]
        ),
        *itertools.product(LAYOUTS, ["contiguous"], ["silu"]),
    ],
)
def test_the_input_the_gradient_and_the_residual_may_differ_in_layout(
    layout, other, activation
):
    for shape in [(4, 5, 6, 3), (2, 3, 11, 13), (6, 5, 7), (3, 5, 2, 4, 3)]:
        residual = "strided" if activation == "silu" else other
        case = Case(
            shape, layout=layout, dy=other, residual=residual, activation=activation
        )
        out = assert_accurate(case)
        if layout != "strided":
            for name in ("y", "dx", "dresidual"):
                assert out[name].stride() == make(case).x.stride()


# Sizes whose last byte of sign bits is only partly used, in every layout.
@pytest.mark.parametrize(
    "shape", [(2, 1), (3, 7), (9, 13), (1, 3, 3, 1), (5, 3, 1, 3), (1, 3, 9, 13)], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_relus_sign_bits_are_right_for_every_value(shape, layout):
    case = Case(
        shape, layout=layout, residual=layout, activation="relu", needs=("residual",)
    )
    tensors = make(case)
    out = run(case, tensors, "triton")
    assert torch.equal(out["dresidual"], torch.where(out["y"] > 0, tensors.dy, 0))


@SOME_SETUPS
def test_relu_passes_no_gradient_at_zero(setup, prepared):
    tensors = make(prepared(setup, affine="bias", residual="contiguous"))
    x, residual = torch.ones_like(tensors.x), torch.zeros_like(tensors.x).requires_grad_()
    bias = torch.zeros_like(tensors.bias).requires_grad_()
    for leaves in ([residual, bias], [bias]):
        y = functional.batch_norm(
            x, None, None, None, bias, True, activation="relu", backend="triton",
            residual=residual if len(leaves) == 2 else None,
        )  # fmt: skip
        for tensor in (y, *torch.autograd.grad(y, leaves, tensors.dy)):
            assert not tensor.any()


@pytest.mark.parametrize("setup", ["planes", "rows, phased", "small planes"])
def test_infinity_and_nan_stay_in_their_channel(setup, prepared):
    case = prepared(setup, activation="relu", residual="contiguous")
    tensors = make(case)
    clean = run(case, tensors, "triton")
    tensors.x[-1, 1] = torch.inf
    tensors.x[0, 2] = torch.nan
    broken, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    assert broken["y"][:, 1:3].isnan().all()
    for name, value in broken.items():
        if name in ("dresidual", "dbias", "num_batches_tracked"):
            continue  # how relu treats nan is checked below
        first = value if value.dim() == 1 else value.movedim(1, 0)
        whole = clean[name] if value.dim() == 1 else clean[name].movedim(1, 0)
        assert torch.equal(first[0], whole[0]), name
        assert torch.equal(first[3:], whole[3:]), name
    assert torch.equal(broken["dresidual"].isnan(), theirs["dresidual"].isnan())
    torch.testing.assert_close(broken["dresidual"][:, 1:3], theirs["dresidual"][:, 1:3])


@EVERY_SETUP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_channel_stats_are_accurate(setup, dtype, prepared):
    x = make(prepared(setup, dtype=dtype, offset=30.0)).x
    mean, var = routes.channel_stats(x)
    assert mean.dtype == var.dtype == reference.accumulator_dtype(dtype)
    exact, dims = x.double(), (0, *range(2, x.dim()))
    tolerance = 1e-6 if mean.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(mean.double(), exact.mean(dims), rtol=tolerance, atol=0)
    exact = exact.var(dims, correction=0)
    torch.testing.assert_close(var.double(), exact, rtol=10 * tolerance, atol=0)


# From 2^23 on, float32 has no fractions, so a sum that rounds at the size of the mean is wrong.
FAR = 2.0**23
# How many adjacent values of a channel are equal. The programs of a channel publish means, which
# are rounded to float32. So all values that one of several programs reads are equal.
EQUAL_VALUES = {
    "planes": 1,
    "planes in tiles": 128,
    "rows": 1,
    "rows, solo": 1,
    "rows, phased": 4,
    "rows, many items": 2,
    "channels_last": 1,
}


@pytest.mark.parametrize("setup", EQUAL_VALUES)
def test_a_variance_does_not_round_at_the_size_of_the_mean(setup, prepared):
    case = prepared(setup)
    n, c, *space = case.shape
    count = n * math.prod(space)
    levels = torch.randint(4, (c, count), generator=torch.Generator().manual_seed(1))
    of_channel = levels.repeat_interleave(EQUAL_VALUES[setup], dim=1)[:, :count]
    x = of_channel.reshape(c, n, *space).transpose(0, 1).float() + FAR
    mean, var = routes.channel_stats(laid_out(x, case.layout))
    exact = x.double().transpose(0, 1).reshape(c, count)
    assert (
        (mean.double() - exact.mean(1)).abs() <= 0.5 + 1e-6
    ).all()  # the nearest float32
    torch.testing.assert_close(
        var.double(), exact.var(1, correction=0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "setup", [name for name in SETUPS if name.startswith("small planes")]
)
def test_the_mean_of_a_small_plane_is_rounded_once(setup, prepared):
    n, c, *space = prepared(setup).shape
    # All samples are equal, so the mean of a column of values is not rounded.
    levels = torch.randint(4, (c, *space), generator=torch.Generator().manual_seed(2))
    x = (levels.float() + FAR).expand(n, c, *space).contiguous()
    mean, _ = routes.channel_stats(x)
    exact = x.double().mean((0, 2, 3))
    assert ((mean.double() - exact).abs() <= 0.5 + 1e-6).all()  # the nearest float32


@pytest.mark.parametrize(
    ("setup", "dtype"),
    [
        *((setup, torch.float32) for setup in ("planes in tiles", *MANY_ITEMS)),
        ("rows, in groups", torch.float64),
    ],
    ids=str,
)
def test_more_parts_than_one_merge_takes_are_merged_right(
    setup, dtype, prepared, monkeypatch
):
    routes.merge_two_at_a_time(monkeypatch, "kp")
    assert_accurate(prepared(setup, dtype=dtype, offset=1e3, residual="contiguous"))


LAYOUT = st.sampled_from(LAYOUTS)
ANY_CALL = st.builds(
    Case,
    shape=st.lists(st.integers(1, 12), min_size=2, max_size=5)
    .map(tuple)
    .filter(lambda s: torch.Size(s).numel() <= 3000 and torch.Size(s).numel() > s[1]),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUT,
    dy=LAYOUT,
    residual=st.none() | LAYOUT,
    affine=st.sampled_from(["", "weight", "bias", "weight+bias"]),
    activation=st.sampled_from(
        [None, "relu", "silu", "gelu", "relu6", "hardswish", "leaky_relu"]
    ),
    mode=st.just("golden") | st.floats(0.01, 10),
    training=st.booleans(),
    momentum=st.sampled_from([None, 0.0, 1.0]) | st.floats(0.001, 1),
    offset=st.sampled_from([0.0, 3.0, 1e3]),
    seed=st.integers(0, 2**31),
)


# Nothing is shrunk: at the interpreter's speed that takes minutes, and the calls are small.
@given(case=ANY_CALL, full_parameters=st.booleans())
@settings(
    max_examples=settings.default.max_examples // 8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_any_call_is_as_close_to_float64_as_torch(case, full_parameters):
    params = torch.promote_types(case.dtype, torch.float32) if full_parameters else None
    assert_accurate(dataclasses.replace(case, params=params))
