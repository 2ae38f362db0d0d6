"""The weights that a conversion scales, creates, or refuses to touch."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import normplug
from normplug import plan, set_mode, swap, unswap
from swap_cases import GOLDEN, X, assert_frozen, frozen, train_step


@pytest.mark.parametrize("mode", ["golden", 4])
def test_preserve_output_keeps_the_output_and_unswap_restores_the_weights(net, mode):
    net.bare = nn.BatchNorm1d(4, affine=False)
    net.head.append(net.bare)
    net.eval()
    expected, keys = net(X), set(net.state_dict())
    swap(net, mode, preserve_output=True)
    torch.testing.assert_close(net(X), expected)
    assert net.bare.weight.requires_grad is False
    swap(net, 0.3, preserve_output=True)
    torch.testing.assert_close(net(X), expected)
    unswap(net)
    torch.testing.assert_close(net(X), expected)
    assert set(net.state_dict()) == keys
    assert all(type(row.module).__module__.startswith("torch") for row in plan(net))


@pytest.mark.parametrize("training", [True, False])
def test_unswap_folds_the_mode_into_the_weights(net, training):
    net.head.append(nn.LayerNorm(4, elementwise_affine=False))
    swap(net, "golden").train(training)
    for _ in range(2):
        train_step(net)
    expected = copy.deepcopy(net)(X)
    assert unswap(net) is net
    torch.testing.assert_close(net(X), expected, rtol=1e-6, atol=1e-6)
    assert b"normplug" not in pickle.dumps(net)
    attributes = {key for m in net.modules() for key in vars(m)}
    assert not any("normplug" in key or key == "target_variance" for key in attributes)
    assert not hasattr(net.norm, "watched_mean")


def test_unswap_without_folding_is_bit_exact(net):
    before = frozen(net)
    swap(net, "golden")
    unswap(net, fold=False)
    assert_frozen(net, before)


def test_a_weight_shared_with_another_layer_is_not_scaled_behind_its_back():
    a, b = nn.LayerNorm(4), nn.LayerNorm(4)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    with pytest.raises(
        ValueError, match="the weight of 0 is shared with 1, which would change"
    ):
        swap(model, "golden", include="0", preserve_output=True)
    expected = model(torch.ones(2, 4).cumsum(1))
    swap(model, "golden", preserve_output=True)  # both: scaled once
    torch.testing.assert_close(model(torch.ones(2, 4).cumsum(1)), expected)
    unswap(model)
    torch.testing.assert_close(a.weight, torch.ones(4))
    assert a.weight is b.weight


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrized_layer_keeps_its_parametrization(name):
    norm = nn.LayerNorm((6, 4) if name == "orthogonal" else 6).eval()
    nn.init.normal_(norm.weight, 1, 0.3)
    getattr(nn.utils.parametrizations, name)(norm, "weight")
    x = torch.randn(5, *norm.normalized_shape)
    expected = norm(x)
    swap(norm, "golden").eval()
    bias = norm.bias.expand_as(x)
    torch.testing.assert_close(norm(x), (expected - bias) * GOLDEN**0.5 + bias)
    normplug.check(norm)
    golden = norm(x)
    torch.testing.assert_close(copy.deepcopy(norm)(x), golden)
    with pytest.raises(ValueError, match="is parametrized; use remove_parametrizations"):
        unswap(norm)
    assert isinstance(norm, normplug.LayerNorm)
    assert parametrize.is_parametrized(norm, "weight")
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is normplug.LayerNorm
    assert type(unswap(norm)) is nn.LayerNorm
    torch.testing.assert_close(norm(x), golden)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "prune"])
def test_a_weight_that_a_hook_computes_is_swapped_but_not_scaled_behind_its_back(how):
    norm = nn.LayerNorm((4, 6)).eval()
    if how == "prune":
        prune.random_unstructured(norm, "weight", amount=0.5)
    else:
        getattr(nn.utils, how)(norm)
    x = torch.randn(5, 4, 6)
    expected = norm(x) * GOLDEN**0.5
    swap(norm, "golden")
    torch.testing.assert_close(norm(x), expected)
    for refused in (unswap, lambda m: swap(m, 2, preserve_output=True)):
        with pytest.raises(ValueError, match="is not a parameter but computed from one"):
            refused(norm)
    torch.testing.assert_close(norm(x), expected)
    if how == "prune":
        prune.remove(norm, "weight")
    else:
        getattr(nn.utils, f"remove_{how}")(norm)
    torch.testing.assert_close(unswap(norm)(x), expected)


def bare():
    return nn.LayerNorm(6, elementwise_affine=False)


def test_a_weight_created_for_a_layer_has_its_neighbours_dtype_and_device():
    half, meta = {"dtype": torch.float16}, {"device": "meta"}
    model = nn.Sequential(
        bare(),
        nn.Sequential(nn.Linear(6, 6, **half), bare()),
        nn.BatchNorm1d(6, affine=False, dtype=torch.float64),
        nn.ModuleList([bare()]),
        nn.Sequential(nn.Linear(6, 6, **meta), bare()),
        nn.Sequential(nn.ReLU(), bare()),
    )
    swap(model, "golden")
    assert [model[i][-1].watched_mean for i in (3, 4, 5)] == [0, None, None]
    unswap(model)
    norms = [m for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm1d))]
    assert [(m.weight.dtype, m.weight.device.type) for m in norms] == [
        (torch.float16, "cpu"),  # no layer precedes it
        (torch.float16, "cpu"),
        (torch.float64, "cpu"),  # its own statistics
        (torch.float64, "cpu"),
        (torch.float32, "meta"),
        (torch.float32, "meta"),
    ]


def test_a_weight_created_without_neighbours_follows_buffers_or_is_float32():
    alone = unswap(swap(bare(), "golden"))
    assert alone.weight.dtype == torch.float32
    x = torch.randn(3, 6, dtype=torch.double)
    torch.testing.assert_close(
        alone.to(x.dtype)(x), swap(bare(), "golden")(x), rtol=1e-6, atol=0
    )
    beside = nn.Sequential(nn.BatchNorm1d(6, affine=False), bare())
    unswap(swap(beside.double(), "golden"))  # a buffer, where there is no parameter
    assert {beside[0].weight.dtype, beside[1].weight.dtype} == {torch.float64}


class Scaled(nn.Module):
    """A norm without weight, and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.RMSNorm(6, elementwise_affine=False)

    def forward(self, x):
        return self.scale * self.norm(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_weight_created_beside_scalars_has_their_dtype(dtype):
    x = torch.randn(3, 6, dtype=dtype)
    model = swap(Scaled().to(dtype), "golden")
    expected = model(x)
    assert unswap(model).norm.weight.dtype == dtype
    torch.testing.assert_close(model(x), expected)
    # Only the watched statistics tell it.
    watched = unswap(swap(bare(), "golden").to(dtype))
    assert watched.weight.dtype == dtype


def test_a_weight_created_without_parameters_has_the_default_dtype_or_the_device_of_the_layer():
    try:
        torch.set_default_dtype(torch.float64)
        assert unswap(swap(bare(), "golden")).weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    layer = swap(bare(), "golden")
    layer.watched_var = layer.watched_var.to("meta")
    layer.watched_mean = layer.watched_mean.to("meta")
    assert unswap(layer).weight.is_meta


TRAINED = {
    "a batch": lambda model: model(torch.randn(8, 4)),
    "a weight": lambda model: nn.init.constant_(model[2].weight[1], 1.1),
    "a bias": lambda model: nn.init.constant_(model[2].bias[0], 0.1),
    "half precision": lambda model: nn.init.constant_(model.bfloat16()[2].weight[3], 2),
}


def alone(call, *arguments, **options):
    """The result of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*arguments, **options)


@pytest.mark.parametrize("change", TRAINED)
def test_a_swap_of_trained_norms_to_another_target_warns_once_with_the_ways_out(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    TRAINED[change](model)
    before, path = frozen(model), 1 if change == "a batch" else 2
    text = (
        rf"normplug.swap: trained norms \({path}\) get another target variance with the same "
        "weights, so the model's outputs change. Pass preserve_output=True to keep them, "
        "or preserve_output=False if this is intended"
    )
    with pytest.raises(UserWarning, match=text):
        alone(swap, model, "golden")
    assert_frozen(model, before)
    for call in (swap, lambda *arguments: normplug.swapped(*arguments).__enter__()):
        with pytest.warns(UserWarning, match=text):
            call(copy.deepcopy(model), 0.5)
    for preserve in (True, False):
        alone(swap, copy.deepcopy(model), "golden", preserve_output=preserve)
    alone(swap, model)
    alone(set_mode, model, 0.5)  # names the change
    alone(swap, model, 0.5)  # no change
    with pytest.warns(UserWarning, match="trained norms") as caught:
        swap(model)  # standard
    assert [w.filename for w in caught] == [__file__]


def test_a_swap_of_an_untrained_model_does_not_warn():
    layers = nn.BatchNorm2d(4), nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)
    model = nn.Sequential(*layers, nn.InstanceNorm2d(4, affine=True))
    nn.init.constant_(model[1].weight, 1e-4)  # as LayerScale starts
    alone(swap, model, "golden")
    with torch.device("meta"):
        alone(swap, nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)), "golden")
    alone(swap, nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)), 0.5)
