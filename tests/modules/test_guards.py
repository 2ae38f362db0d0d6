"""Code that folds, rebuilds or recomputes a norm from its attributes is right, or gives nan."""

import copy
import json
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from matrix import randomised
from normplug import BatchNorm2d, LayerNorm, RMSNorm, check, fuse, set_mode, swap, unswap
from swap_cases import NEEDS_GUARDS, one_graph

X = torch.randn(2, 3, 8, 8)


class ConvNormAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def fuse(self):
        factor = self.bn.weight / torch.sqrt(self.bn.eps + self.bn.running_var)
        fused = nn.Conv2d(3, 4, 3, padding=1)
        with torch.no_grad():
            fused.weight.copy_(self.conv.weight * factor.reshape(-1, 1, 1, 1))
            fused.bias.copy_(self.bn.bias - self.bn.running_mean * factor)
        return nn.Sequential(fused, self.act)


def assert_loud(tool, model, x=X):
    """Assert that a golden model gives nan through the tool, and the right output after unswap."""
    swap(model.eval(), "golden")
    with torch.no_grad():
        expected = model(x)
        assert tool(copy.deepcopy(model))(x).isnan().any()
        assert_right(tool, unswap(copy.deepcopy(model)), x, expected)
        set_mode(model, "standard")
        assert_right(tool, copy.deepcopy(model), x, model(x))


def assert_right(tool, model, x, expected):
    scale = expected.abs().max()
    torch.testing.assert_close(
        tool(model)(x) / scale, expected / scale, rtol=1e-4, atol=1e-5
    )


def with_its_attributes(model):
    conv, bn = model
    new = nn.BatchNorm2d(bn.num_features)
    new.__dict__ = dict(vars(bn))
    return nn.Sequential(conv, new)


# torch's and timm's tools, which rebuild or fold a BatchNorm, are in the matrix: see `test_matrix`.
def test_a_batch_norm_with_all_attributes_of_another_is_right_or_gives_nan():
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4))
    )
    assert_loud(with_its_attributes, model)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(4), (8, 4)),
        (nn.RMSNorm(4), (8, 4)),
        (nn.GroupNorm(2, 4), (8, 4)),
        (nn.BatchNorm1d(4), (8, 4)),
        (nn.InstanceNorm1d(4), (2, 4, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_stock_forward_gives_nan_and_check_names_the_layer(norm, shape):
    def in_float32(self, x):
        return stock.forward(self, x.float()).to(x.dtype)

    stock, x, norm = type(norm), torch.randn(shape), copy.deepcopy(norm).train()
    for mode in ("standard", "golden"):
        swap(norm, mode)
        expected = norm(x)
        norm.forward = types.MethodType(in_float32, norm)
        if mode == "standard":
            torch.testing.assert_close(norm(x), expected)
        else:
            assert norm(x).isnan().all()
            with pytest.raises(
                RuntimeError, match=r"forward was replaced on the instance"
            ):
                check(nn.Sequential(norm))
        del norm.forward


def test_reparameterising_a_fused_model_is_right_or_gives_nan():
    manipulate = pytest.importorskip("timm.utils.model")
    model = randomised(nn.Sequential(ConvNormAct()))
    fuse(swap(model.eval(), "golden"))
    assert normplug.fusions(model).rows[0].label == "ReLU"
    assert_loud(manipulate.reparameterize_model, model)


@pytest.mark.parametrize(
    "layer",
    [
        BatchNorm2d(3, eps=0.1, mode=0.5),
        LayerNorm(3, eps=0.1, mode=0.5),
        RMSNorm(3, mode=0.5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_eps_is_shown_copied_and_set_but_not_computed_with(layer):
    true = None if isinstance(layer, RMSNorm) else 0.1
    assert f"{layer.eps} {layer.eps!r}" == f"{true} {true!r}"
    assert f"eps={true}" in repr(layer)
    assert json.dumps({"eps": layer.eps}) == '{"eps": NaN}'
    assert (torch.ones(2) + layer.eps).isnan().all()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert str(twin.eps) == str(true)
        twin.eps = layer.eps  # keeps it
        assert twin.extra_repr() == layer.extra_repr()
        twin.eps = 0.25
        assert f"{twin.eps:.3f}" == "0.250"
        twin.mode = "standard"
        assert twin.eps == vars(twin)["eps"] == 0.25


def test_a_new_eps_takes_effect_and_survives_unswap():
    model = swap(nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)), "golden")
    x = torch.randn(8, 4)
    before = model(x)
    for norm in model:
        norm.eps = 10.0
    after = model(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(unswap(model)(x), after)
    assert [norm.eps for norm in model] == [10.0, 10.0]
    assert not any("_normplug" in vars(norm) for norm in model)


@pytest.mark.parametrize("name", ["repvgg_a0", "fastvit_t8", "repvit_m0_9", "levit_128s"])
def test_timms_reparameterisation_is_right_or_gives_nan(name):
    timm = pytest.importorskip("timm")
    from timm.utils.model import reparameterize_model

    model = randomised(timm.create_model(name, num_classes=4))
    size = 224 if name == "levit_128s" else 64  # which takes no other size
    assert_loud(reparameterize_model, model, torch.randn(2, 3, size, size))


class Recomputes(nn.Module):
    """Passes its norm's tensors to torch's function."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm = self.norm
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(
                x, norm.normalized_shape, norm.weight, norm.bias, norm.eps
            )
        mean, var = norm.running_mean, norm.running_var
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, eps=norm.eps)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4)], ids=str)
def test_a_forward_that_recomputes_a_norm_gives_nan_eager_exported_and_compiled(norm):
    model, x = swap(Recomputes(copy.deepcopy(norm)).eval(), "golden"), torch.randn(8, 4)
    assert model(x).isnan().all()
    for make in (lambda model: torch.export.export(model, (x,)).module(), one_graph):
        try:
            assert make(model)(x).isnan().all()
        except torch._dynamo.exc.Unsupported:
            # Refused: torch 2.6 and 2.7 trace no such eps.
            assert torch.__version__ < "2.8"
    set_mode(model, "standard")
    torch.testing.assert_close(one_graph(model)(x), model(x))
    torch.testing.assert_close(model(x), model.norm(x))


@NEEDS_GUARDS
@pytest.mark.parametrize(
    "norm", [LayerNorm(4, mode=0.5), normplug.BatchNorm1d(4, mode=0.5)]
)
def test_a_compiled_layer_follows_its_eps(norm):
    x = torch.randn(8, 4)
    compiled = one_graph(norm.eval())
    for eps in (1e-5, 1.0, 2.0):
        norm.eps = eps
        torch.testing.assert_close(compiled(x), norm(x))
