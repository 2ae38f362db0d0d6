"""Code that folds, rebuilds or recomputes a norm from its attributes is right, or refused."""

import copy
import inspect
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from matrix import randomised
from normplug import BatchNorm2d, LayerNorm, check, fuse, set_mode, swap, unswap
from swap_cases import NEEDS_GUARDS, one_graph

X = torch.randn(2, 3, 8, 8)


def folded(conv, weight, bias, mean, std):
    fused = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, 1)
    with torch.no_grad():
        fused.weight.copy_(conv.weight * (weight / std).reshape(-1, 1, 1, 1))
        fused.bias.copy_(bias - mean * weight / std)
    return fused


def fuse_conv_and_bn(conv, bn):
    std = torch.sqrt(bn.eps + bn.running_var)
    return folded(conv, bn.weight, bn.bias, bn.running_mean, std)


def inverse_std(var, norm):
    return torch.rsqrt(var + norm.eps)


def eps_of(norm):
    return norm.eps


def read(module, name):
    return getattr(module, name)


def by_a_root(bn):
    return torch.sqrt(bn.eps + bn.running_var)


def by_a_formula(bn):
    return 1 / inverse_std(bn.running_var, bn)


def by_a_getter(bn):
    return (bn.running_var + eps_of(bn)) ** 0.5


def by_names(bn):
    return (read(bn, "running_var") + read(bn, "eps")) ** 0.5


def by_a_comprehension(bn):
    var, eps = [getattr(bn, name) for name in ("running_var", "eps")]
    return (var + eps) ** 0.5


def by_an_attrgetter(bn):
    var, eps = operator.attrgetter("running_var", "eps")(bn)
    return (var + eps) ** 0.5


def by_a_lambda(bn):
    return (lambda norm: (norm.running_var + norm.eps) ** 0.5)(bn)


STDS = [by_a_root, by_a_formula, by_a_getter, by_names, by_a_comprehension]
STDS += [by_an_attrgetter, by_a_lambda]


class ConvNormAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def fuse(self):
        return nn.Sequential(fuse_conv_and_bn(self.conv, self.bn), self.act)


def assert_refused(tool, reader, model, x=X):
    """Assert that a golden model refuses the tool, stays unchanged, and allows it after unswap."""
    swap(model.eval())
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(RuntimeError, match=rf"{reader} would drop the target variance of a "):
            tool(model)
        assert torch.equal(model(x), expected)
        assert_right(tool, unswap(copy.deepcopy(model)), x, expected)
        set_mode(model, "standard")
        assert_right(tool, model, x, model(x))


def assert_right(tool, model, x, expected):
    scale = expected.abs().max()
    torch.testing.assert_close(tool(model)(x) / scale, expected / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("std", STDS, ids=lambda std: std.__name__)
def test_code_that_folds_a_batch_norm_is_refused(std):
    def tool(model):
        conv, bn = model
        return folded(conv, bn.weight, bn.bias, bn.running_mean, std(bn))

    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)))
    assert_refused(tool, "", model)


def test_reparameterising_a_fused_model_is_right_or_refused():
    manipulate = pytest.importorskip("timm.utils.model")
    model = randomised(nn.Sequential(ConvNormAct()))
    fuse(swap(model.eval()))
    assert normplug.fusions(model).rows[0].label == "ReLU"
    assert_refused(manipulate.reparameterize_model, r"test_guards\.fuse_conv_and_bn", model)


def test_the_error_names_the_reader_and_the_way_out():
    # The function that reads eps must handle the target variance, not its caller.
    layer = BatchNorm2d(3, mode=normplug.target_variance("golden"))
    text = (
        r"normplug: test_guards.fuse_conv_and_bn would drop the target variance of a BatchNorm2d "
        r"in mode golden: it reads eps .* call normplug.unswap\(model\) first: .* Code that reads "
        "target_variance too is let through"
    )
    with pytest.raises(RuntimeError, match=text):
        fuse_conv_and_bn(nn.Conv2d(3, 3, 3), layer)


OF_EACH_KIND = pytest.mark.parametrize(
    "layer", [BatchNorm2d(3, eps=0.1), LayerNorm(3, eps=0.1)], ids=["BatchNorm2d", "LayerNorm"]
)


@OF_EACH_KIND
def test_eps_can_be_read_without_computing_with_it(layer):
    assert (layer.eps, read(layer, "eps"), eps_of(layer)) == (0.1, 0.1, 0.1)
    assert dict(inspect.getmembers(layer))["eps"] == 0.1
    assert "eps=0.1" in repr(layer)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.eps == 0.1
        twin.eps = 0.2
        assert (twin.eps, vars(twin)["eps"]) == (0.2, 0.2)
        assert "eps=0.2" in repr(twin)


@OF_EACH_KIND
def test_code_that_also_reads_the_target_variance_may_compute_with_eps(layer):
    std = ((layer.running_var + layer.eps) / layer.target_variance) ** 0.5
    torch.testing.assert_close(std, torch.full_like(std, (1.1 / 0.6180339887498949) ** 0.5))


def test_a_new_eps_takes_effect_and_survives_unswap():
    model = swap(nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)))
    x = torch.randn(8, 4)
    before = model(x)
    for norm in model:
        norm.eps = 10.0
    after = model(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(unswap(model)(x), after)
    assert [norm.eps for norm in model] == [10.0, 10.0]
    assert not any("_eps" in vars(norm) for norm in model)


TIMM = ["repvgg_a0", "mobileone_s0", "fastvit_t8", "repvit_m0_9", "tiny_vit_5m_224"]
TIMM += ["repghostnet_050", "levit_128s", "efficientvit_m0"]
LARGE = ("levit_128s", "efficientvit_m0")  # these need large images


@pytest.mark.parametrize("name", TIMM)
def test_timms_reparameterisation_is_right_or_refused(name):
    timm = pytest.importorskip("timm")
    from timm.utils.model import reparameterize_model

    model = randomised(timm.create_model(name, num_classes=4))
    size = 224 if name in LARGE else 64
    x = torch.randn(2, 3, size, size)
    reader = r"timm\.models\.\w+\.(\w+\.)?(fuse|_fuse_bn_tensor)"
    assert_refused(reparameterize_model, reader, model, x)


def test_a_refused_reparameterisation_in_place_changes_nothing():
    timm = pytest.importorskip("timm")
    from timm.utils.model import reparameterize_model

    model = swap(randomised(timm.create_model("repvit_m0_9", num_classes=4)).eval())
    modules, x = list(model.modules()), torch.randn(2, 3, 64, 64)
    expected = model(x)
    with pytest.raises(RuntimeError, match="fuse would drop"):
        reparameterize_model(model, inplace=True)
    assert list(model.modules()) == modules
    assert torch.equal(model(x), expected)
    reparameterize_model(unswap(model), inplace=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_check_finds_a_fold_that_does_not_read_eps():
    """A fold in place with an eps of its own is not refused, but its layer is missing."""
    model = swap(randomised(nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4))))
    bn = model[1]
    std = (bn.running_var + 1e-5) ** 0.5
    model[0], model[1] = folded(model[0], bn.weight, bn.bias, bn.running_mean, std), nn.Identity()
    with pytest.raises(RuntimeError, match="1: swapped in mode golden, now a Identity"):
        check(model)


class Recomputes(nn.Module):
    """Passes its norm's tensors to torch's function."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm = self.norm
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        mean, var = norm.running_mean, norm.running_var
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, eps=norm.eps)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4)], ids=str)
def test_a_forward_that_recomputes_a_norm_is_refused_and_not_compiled(norm):
    model, x = swap(Recomputes(copy.deepcopy(norm)).eval()), torch.randn(8, 4)
    with pytest.raises(RuntimeError, match="forward would drop the target variance"):
        model(x)
    for fullgraph in (True, False):
        torch.compiler.reset()
        with pytest.raises(Exception, match="'eps'|eps.* must be|complex"):
            torch.compile(model, backend="aot_eager", fullgraph=fullgraph)(x)
    set_mode(model, "standard")
    torch.testing.assert_close(one_graph(model)(x), model(x))
    torch.testing.assert_close(model(x), model.norm(x))


@NEEDS_GUARDS
@pytest.mark.parametrize("norm", [LayerNorm(4, mode=0.5), normplug.BatchNorm1d(4, mode=0.5)])
def test_a_compiled_layer_follows_its_eps(norm):
    x = torch.randn(8, 4)
    compiled = one_graph(norm.eval())
    for eps in (1e-5, 1.0, 2.0):
        norm.eps = eps
        torch.testing.assert_close(compiled(x), norm(x))
