"""GroupNorm's kernels."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import routes
from accuracy import assert_same_bits, error, leaf
from group_kernel_cases import Case, assert_accurate, make, run
from kernel_cases import HALF
from normplug import GroupNorm, _kernels, swap
from normplug._activations import ACTIVATIONS
from normplug._kernels.group_norm import schedule
from swap_cases import one_graph


def cut(**changes):
    """Small sizes for a schedule, and these changes."""

    def change(shape):
        names = {field.name for field in fields(shape)}
        small = {"warps": 1, "lag": 0, "r": 1, "finish": 4}
        if isinstance(shape, schedule.PlanesBackward):
            small["splits"] = shape.n
        return replace(
            shape, **{n: v for n, v in (small | changes).items() if n in names}
        )

    return change


def planes(shape, groups, backward=None, **forward):
    cuts = {
        "group_norm_forward": cut(**forward),
        "group_norm_backward": cut(**backward or {}),
    }
    return Case(shape, groups), cuts


def columns(shape, groups, **changes):
    cuts = dict.fromkeys(("group_norm_forward", "group_norm_backward"), cut(**changes))
    return Case(shape, groups, layout="channels_last"), cuts


SETUPS = {
    "held groups": planes((3, 8, 5), 4),
    "held groups, together": planes((3, 15, 7), 5, r=4, backward={"r": 2, "splits": 2}),
    "held groups, even": planes((2, 4, 2, 4), 2, r=2, backward={"r": 2, "splits": 1}),
    "groups read twice": planes((3, 6, 10), 2, block=8, run=2),
    "groups read twice, even": planes((2, 4, 8), 2, block=4, run=4),
    "groups read twice, many tiles": planes((1, 2, 66), 1, block=4, run=2),
    "tiles of planes": planes(
        (2, 6, 10), 2, block=16, run=2, lag=3, backward={"cb": 2, "sb": 8, "lag": 5}
    ),
    "tiles of planes, even": planes(
        (2, 4, 8), 2, block=8, run=8, lag=4, backward={"cb": 1, "sb": 8, "lag": 2}
    ),
    "samples alone": columns((3, 12, 7), 4, bc=16, u=2, bt=2, rows_each=7),
    "samples alone, even": columns((3, 8, 4), 8, bc=8, u=2, bt=2, rows_each=4),
    "items of columns": columns((2, 9, 5, 2), 3, bc=8, u=2, bt=2, rows_each=8, lag=5),
    "items of columns, even": columns((2, 16, 8), 4, bc=8, u=1, bt=2, rows_each=4, lag=5),
    # More tiles than one merge takes.
    "many tiles of planes": planes(
        (1, 2, 66), 1, block=4, run=2, lag=33, backward={"cb": 2, "sb": 2, "lag": 34}
    ),
    "many items of columns": columns((1, 4, 67), 2, bc=4, u=1, bt=2, rows_each=2, lag=34),
    "more groups than are finished at a time": columns(
        (1, 70, 3), 35, bc=8, rows_each=3, lag=9
    ),
    "wide groups": columns((2, 40, 3), 1, bc=16, u=2, bt=1, rows_each=3, lag=4),
}
EACH_KERNEL = pytest.mark.parametrize(
    "setup",
    [
        "held groups",
        "groups read twice",
        "tiles of planes",
        "samples alone",
        "items of columns",
    ],
)
VARIANTS = [
    {**HALF, "activation": "silu", "offset": 100.0},
    {"offset": 1e3, "affine": "weight", "dy": "strided"},
    {
        "dtype": torch.float64,
        "affine": "",
        "activation": "gelu",
        "eps": 0.1,
        "offset": 1e3,
    },
    {"dtype": torch.float16, "activation": "relu", "affine": "bias", "mode": 1.0},
    {"dtype": torch.float64, "activation": ("leaky_relu", 0.2), "offset": 1e3},
]
# Each setup in two of the variants, and those with many programs in one.
PAIRS = [
    (setup, VARIANTS[(place + turn) % len(VARIANTS)])
    for place, setup in enumerate(SETUPS)
    for turn in ((0, 2) if "many" not in setup else (0,))
]


@pytest.mark.parametrize(("setup", "options"), PAIRS, ids=str)
def test_as_close_to_float64_as_torch(prepared, setup, options):
    case = prepared(setup, **options)
    out = assert_accurate(case)
    assert out["y"].stride() == out["dx"].stride() == make(case).x.stride()


@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("leaky_relu", 0.3)], ids=str)
def test_groups_read_twice_have_every_activation(prepared, activation):
    options = {"activation": activation, "offset": 1e3, "seed": 7}
    assert_accurate(prepared("groups read twice", **options, params=torch.float64))
    assert_accurate(prepared("groups read twice, even", **options, affine="weight"))


def test_the_first_tile_of_a_group_read_twice_may_be_far_from_the_others(prepared):
    case = prepared("groups read twice, many tiles", activation="silu")
    tensors = make(case)
    tensors.x[:, 0, :4] += 1e3
    exact = run(replace(case, dtype=torch.float64), tensors.to(torch.float64), "torch")
    for name, value in run(case, tensors, "triton").items():
        assert error(value, exact[name]) < 1e-6, name


def test_rounding_makes_no_variance_negative(monkeypatch):
    # A lane adds 5,000 equal values, and each addition rounds the same way. The variance is small
    # beside the sum of squares, and would come out negative.
    rows = 5001
    case, schedules = columns((1, 2, rows), 1, bc=2, u=1, bt=1, rows_each=rows)
    routes.reschedule(monkeypatch, **schedules)
    x = torch.full((1, rows, 2), 1.767337 * 1024).transpose(1, 2)
    x[:, :, 0] = 0.0
    assert routes.by_kernels(routes.Tensors(x), case.spec).isfinite().all()


# From 2^23 on, float32 has no fractions, so a sum that rounds at the size of the mean is wrong.
@pytest.mark.parametrize(
    "setup",
    [name for name in SETUPS if name.startswith(("held groups", "groups read twice"))],
)
def test_a_variance_does_not_round_at_the_size_of_the_mean(prepared, setup):
    case = prepared(setup)
    options = {"track_running_stats": True, "momentum": 1.0, "backend": "triton"}
    layer = GroupNorm(case.groups, case.shape[1], **options)
    x = torch.randint(4, case.shape, generator=torch.Generator().manual_seed(1)) + 2.0**23
    layer(x)
    of_groups = x.double().reshape(case.shape[0], case.groups, -1).var(2, correction=0)
    torch.testing.assert_close(
        layer.watched_var.double(), of_groups.mean(), rtol=1e-5, atol=0
    )


@EACH_KERNEL
@pytest.mark.parametrize("needs", [("x",), ("weight",), ("x", "bias")], ids="+".join)
def test_a_subset_of_the_gradients_can_be_requested(prepared, setup, needs):
    out = assert_accurate(prepared(setup, needs=needs, activation="silu"))
    assert {name for name in out if name.startswith("d")} == {
        f"d{name}" for name in needs
    }


@EACH_KERNEL
def test_64_bit_offsets_give_the_same_bits(prepared, setup, monkeypatch):
    case = prepared(setup, activation="relu")
    tensors = make(case)
    expected = run(case, tensors, "triton")
    routes.use_64_bit_offsets(monkeypatch)
    assert_same_bits(run(case, tensors, "triton"), expected)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_output_and_the_input_gradient_may_differ_in_dtype(layout):
    out = assert_accurate(Case((2, 6, 5), 3, **HALF, layout=layout, output=torch.float32))
    assert (out["y"].dtype, out["dx"].dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_schedules_own_choices_are_right_for_small_inputs(layout):
    for shape, groups in [
        ((2, 6), 3),
        ((2, 6, 3, 3, 2), 6),
        ((5, 4, 40), 1),
        ((1, 24, 9), 2),
    ]:
        assert_accurate(Case(shape, groups, layout=layout, activation="silu"))


@pytest.mark.parametrize(
    "options", [{**HALF, "activation": "silu"}, {"offset": 1e3}], ids=str
)
def test_the_schedule_of_groups_read_twice_is_right_for_its_own_sizes(
    options, monkeypatch
):
    monkeypatch.setattr(_kernels, "processors", lambda device: 1)
    routes.forget(monkeypatch)
    for shape in [(2, 10, 4, 601), (1, 10, 8, 256)]:
        case = Case(shape, 2, **options)
        sizes = (shape[0], 2, 5, shape[2] * shape[3], False, case.dtype.itemsize, 1)
        assert schedule.group_norm_forward(*sizes).solo
        assert_accurate(case)


def test_tensors_of_other_layouts_are_accepted():
    for layout, dy in [("strided", "expanded"), ("channels_last", "contiguous")]:
        out = assert_accurate(Case((2, 6, 3, 4), 3, layout=layout, dy=dy))
        assert out["y"].is_contiguous() == (layout == "strided")


def test_the_kernels_refuse_groups_of_2_to_the_31_values():
    spec = Case((), 1).spec
    large = torch.empty(1).expand(1, 1, 2**31)
    assert "2^31" in spec.refusal(routes.Tensors(large))
    assert spec.refusal(routes.Tensors(torch.empty(2, 4, 8))) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_instance_norm_updates_its_running_statistics_from_the_kernels(compiled):
    layers = [
        swap(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), backend=backend)
        for backend in ("triton", "torch")
    ]
    calls = [one_graph(layers[0]) if compiled else layers[0], layers[1]]
    for step in range(2):
        x = torch.randn(2, 4, 3, 5) * 2 + 3 + step
        inputs = [leaf(x) for _ in calls]
        sums = [call(x).square().sum() for call, x in zip(calls, inputs, strict=True)]
        torch.testing.assert_close(*torch.autograd.grad(sums, inputs))
    with torch.no_grad():
        torch.testing.assert_close(*(call(x) for call in calls))
    torch.testing.assert_close(*(dict(layer.named_buffers()) for layer in layers))
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(*(call(x) for call in calls))


def test_group_norm_tracks_the_statistics_that_the_kernels_compute():
    layers = [
        swap(nn.GroupNorm(2, 4), track_running_stats=True, backend=backend)
        for backend in ("triton", "torch")
    ]
    x = leaf(torch.randn(2, 4, 3, 5) * 2 + 3)
    outputs = [layer(x) for layer in layers]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(dict(layer.named_buffers()) for layer in layers))
    second = []
    for y in outputs:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        second += torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.3])
def test_the_watched_variance_of_equal_values_is_not_negative(eps):
    norm = swap(nn.GroupNorm(2, 4, eps=eps), track_running_stats=True, backend="triton")
    norm(torch.full((2, 4, 5), 3.0))
    assert norm.watched_count == 1
    assert 0.9 - 1e-6 <= norm.watched_var <= 0.9 + 1e-6  # it was 1, and the batch's is 0
    norm.watched_var.zero_()
    norm(torch.full((2, 4, 5), 3.0))
    assert norm.watched_var >= 0
