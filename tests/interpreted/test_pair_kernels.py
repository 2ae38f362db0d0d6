"""A BatchNorm, and the BatchNorm of the residual that it adds, in one call of the kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_batch_norm_kernels import ANY_CALL, FEW_ITEMS, MANY_ITEMS
from torch.utils.checkpoint import checkpoint

import pair_cases
import routes
from calls import assert_recomputable, paired
from kernel_cases import HALF, Case
from pair_cases import assert_accurate, pair

SETUPS = FEW_ITEMS | MANY_ITEMS
VARIANTS = [
    {"activation": "relu"},
    {"dtype": torch.float16, "activation": "relu", "affine": "bias", "running": False},
    {**HALF, "activation": "relu", "other": {"momentum": None, "eps": 0.1}},
    {"dtype": torch.float64, "activation": "gelu", "other": {"affine": ""}},
    {"activation": ("leaky_relu", 0.2), "offset": 1e3, "mode": "standard"},
    {**HALF, "affine": "weight", "offset": 1e3, "mode": 4},
]
SOME_SETUPS = pytest.mark.parametrize(
    "setup", ["planes in tiles", "rows, phased", "small planes"]
)


def chosen(prepared, setup, other=None, **options):
    """The pair of a setup's case, with its schedules."""
    case = prepared(setup, **options)
    return pair(other=other, **{f.name: getattr(case, f.name) for f in fields(case)})


@paired(SETUPS, VARIANTS, 0, 2, 4)
def test_every_setup_is_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(chosen(prepared, setup, **options))


@SOME_SETUPS
def test_64_bit_offsets_are_accurate(setup, prepared, monkeypatch):
    routes.use_64_bit_offsets(monkeypatch)
    assert_accurate(chosen(prepared, setup, activation="relu"))


NEEDS = [
    (("x",), ()),
    (("weight",), ()),
    ((), ("x",)),
    ((), ("weight",)),
    (("bias",), ("x", "bias")),
    ((), ()),
]


@SOME_SETUPS
@pytest.mark.parametrize(("needs", "of_other"), NEEDS)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_subset_of_the_gradients_can_be_requested(
    setup, needs, of_other, activation, prepared
):
    options = {"activation": activation, "needs": needs, "other": {"needs": of_other}}
    results = assert_accurate(chosen(prepared, setup, **options))
    expected = {f"d{name}" for name in needs}
    expected |= {"dresidual" if n == "x" else f"dother_{n}" for n in of_other}
    assert {name for name in results if name.startswith("d")} == expected


@pytest.mark.parametrize(
    "setup", ["planes in tiles", "rows, many items", "small planes, many items"]
)
def test_more_parts_than_one_merge_takes_are_merged_right(setup, prepared, monkeypatch):
    routes.merge_two_at_a_time(monkeypatch, "kp")
    assert_accurate(chosen(prepared, setup, offset=1e3, activation="relu"))


@pytest.mark.parametrize("dy", ["contiguous", "channels_last", "expanded"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_the_inputs_and_the_gradient_may_differ_in_layout(layout, dy):
    for shape in [(4, 5, 6, 3), (2, 3, 11, 13)]:
        other = {"layout": "channels_last"}
        assert_accurate(pair(shape, other, layout=layout, dy=dy, activation="leaky_relu"))


def fused(case, tensors):
    """A function of both inputs, and of the parameters of both norms, which it returns, too."""
    one, other = pair_cases.layers_of(case, tensors)
    parameters = [*one.parameters(), *other.parameters()]

    def call(x, residual, *parameters):
        return one._fused_norms(x, residual, other, case.one.activation)

    return call, parameters


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 11, 10)], ids=str)
def test_first_and_second_derivatives_are_right(shape, activation):
    case = pair(shape, dtype=torch.float64, activation=activation, running=False)
    tensors = pair_cases.make(case)
    call, parameters = fused(case, tensors)
    inputs = [values.x.requires_grad_() for values in tensors]
    assert torch.autograd.gradcheck(call, (*inputs, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (*inputs, *parameters), fast_mode=True)


@SOME_SETUPS
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_the_backward_can_recompute_the_output(setup, activation, prepared):
    case = chosen(prepared, setup, activation=activation)
    tensors = pair_cases.make(case)
    call, parameters = fused(case, tensors)
    y = call(tensors[0].x, tensors[1].x)
    assert_recomputable(y, [])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_bits(use_reentrant):
    case = pair((4, 5, 3, 2), activation="relu", running=False)
    tensors = pair_cases.make(case)

    def step(run):
        call, parameters = fused(case, tensors)
        inputs = [values.x.detach().requires_grad_() for values in tensors]
        y = run(call, *inputs)
        y.backward(tensors[0].dy)
        return [y, *(t.grad for t in (*inputs, *parameters))]

    plain = step(lambda call, *inputs: call(*inputs))
    again = step(partial(checkpoint, use_reentrant=use_reentrant))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_statistics_are_safe_for_each_norm_by_itself():
    case = pair((6, 5), activation="relu")
    tensors = pair_cases.make(case)
    tensors[1].x[0, 1] = torch.inf
    one, other = pair_cases.layers_of(case, tensors)
    for each in (one, other):
        each.statistics = "safe"
    one._fused_norms(tensors[0].x, tensors[1].x, other, "relu")
    old_mean = tensors[1].running_mean
    is_old = other.running_mean == old_mean
    assert is_old.tolist() == [False, True, False, False, False]
    assert not (one.running_mean == tensors[0].running_mean).any()


OTHER = st.fixed_dictionaries(
    {
        "affine": st.sampled_from(["", "weight", "bias", "weight+bias"]),
        "mode": st.just("golden") | st.floats(0.01, 10),
        "momentum": st.sampled_from([None, 0.0, 1.0]) | st.floats(0.001, 1),
        "eps": st.sampled_from([1e-5, 0.1]),
        "offset": st.sampled_from([0.0, 3.0, 1e3]),
    }
)


# Nothing is shrunk: at the interpreter's speed that takes minutes, and the calls are small.
@given(case=ANY_CALL, other=OTHER, full_parameters=st.booleans())
@settings(
    max_examples=settings.default.max_examples // 8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_any_pair_is_as_close_to_float64_as_torch(
    case: Case, other: dict, full_parameters
):
    wide = torch.promote_types(case.dtype, torch.float32)
    case = replace(case, training=True, params=wide if full_parameters else None)
    assert_accurate(
        pair(other=other, **{f.name: getattr(case, f.name) for f in fields(case)})
    )
