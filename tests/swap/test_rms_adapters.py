"""RMSNorms of transformers and diffusers: which a probe accepts, and which it leaves."""

import copy
import pickle
from importlib import import_module

import pytest
import torch
from torch import nn

from normplug import check, plan, swap, target_variance, unswap
from normplug._convert import norm_layers
from swap_cases import one_graph

ROOT = target_variance("golden") ** 0.5
X = 3 + 2 * torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def normalised(x, eps):
    h = x.to(torch.float32)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


class LlamaNorm(nn.Module):
    """Rounds to the dtype of the input, then multiplies by the weight."""

    def __init__(self, width=8, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x):
        return self.weight * normalised(x, self.variance_epsilon).to(x.dtype)


class T5Norm(LlamaNorm):
    """Rounds to the dtype of the weight, if that is half."""

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        h = x * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            h = h.to(self.weight.dtype)
        return self.weight * h


class OlmoNorm(LlamaNorm):
    """Rounds once, at the end."""

    def forward(self, x):
        return (self.weight * normalised(x, self.variance_epsilon)).to(x.dtype)


class GemmaNorm(nn.Module):
    """Adds one to its weight."""

    def __init__(self, width=8, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        return (normalised(x, self.eps) * (1.0 + self.weight.float())).type_as(x)


class OptionalNorm(nn.Module):
    """May have no weight: in one library None, in another no attribute at all."""

    def __init__(self, width=8, eps=1e-3, with_scale=True):
        super().__init__()
        self.eps, self.dim, self.weight, self.bias = eps, (width,), None, None
        if with_scale:
            self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return h.to(x.dtype)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            h = h.to(self.weight.dtype)
        h = h * self.weight
        return h if self.bias is None else h + self.bias


class ScaledNorm(GemmaNorm):
    def __init__(self, width=8, eps=1e-3, with_scale=True):
        super().__init__(width, eps)
        self.with_scale = with_scale
        if not with_scale:
            del self.weight

    def forward(self, x):
        h = x.float() * torch.pow(
            x.float().pow(2).mean(-1, keepdim=True) + self.eps, -0.5
        )
        return (h * self.weight.float() if self.with_scale else h).type_as(x)


class GatedNorm(LlamaNorm):
    def forward(self, x, gate=None):
        return super().forward(x) * (1 if gate is None else gate.sigmoid())


class HalfStatisticsNorm(LlamaNorm):
    """Right in float32, but sums in half precision if its input has it."""

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h


class LateEpsNorm(LlamaNorm):
    def forward(self, x):
        return (
            self.weight
            * x
            / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        )


KNOWN = [LlamaNorm, T5Norm, OlmoNorm, GemmaNorm, OptionalNorm, ScaledNorm]
for _cls in (*KNOWN, GatedNorm, HalfStatisticsNorm, LateEpsNorm):
    _cls.__module__ = (
        "transformers.models.some.modeling_some"  # which need not be installed
    )


def norm_of(cls, *args, **kwargs):
    layer = cls(*args, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.5, 0.3, generator=torch.Generator().manual_seed(1))
    return layer


@pytest.fixture(params=KNOWN, ids=lambda cls: cls.__name__)
def layer(request):
    return norm_of(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_standard_is_the_librarys_layer_bit_for_bit(layer, dtype, weight):
    layer, x = layer.to(weight), X.to(dtype)
    expected = layer(x)
    got = swap(layer, "standard")(x)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_every_tool_works_in_mode_golden_and_unswap_restores_the_layer(layer):
    model, stock = nn.Sequential(layer), copy.deepcopy(layer)
    swap(model, "golden", track_running_stats=True)
    check(model, X)
    assert [row.becomes for row in plan(model)] == [type(stock).__name__]
    assert [name for name, _ in norm_layers(model)] == ["0"]
    torch.testing.assert_close(model(X), stock(X) * ROOT)
    # So the library `kernels` leaves it alone.
    assert not model[0].kernel_condition(model[0])
    expected = model(X)
    torch.testing.assert_close(one_graph(model)(X), expected)
    torch.testing.assert_close(copy.deepcopy(model)(X), expected)
    torch.testing.assert_close(unswap(copy.deepcopy(model))(X), expected)
    unswap(model, fold=False)
    assert type(model[0]) is type(stock)
    assert vars(model[0]).keys() == vars(stock).keys()
    assert torch.equal(model(X), stock(X))
    swap(model, "golden", preserve_output=True)
    torch.testing.assert_close(model(X), stock(X))
    torch.testing.assert_close(
        unswap(model).state_dict(), nn.Sequential(stock).state_dict()
    )


def test_code_that_recomputes_it_by_its_own_eps_gets_nan(layer):
    name = "variance_epsilon" if isinstance(layer, LlamaNorm) else "eps"

    def recompute(norm):
        return X * torch.rsqrt(X.square().mean(-1, keepdim=True) + getattr(norm, name))

    torch.testing.assert_close(recompute(layer), recompute(swap(layer, "standard")))
    assert recompute(swap(layer, "golden")).isnan().all()
    setattr(layer, name, 0.5)
    assert (layer._eps, str(vars(layer)[name])) == (0.5, "0.5")


@pytest.mark.filterwarnings("ignore:normplug. .* gets a weight of")
def test_a_missing_weight_is_created_if_the_forward_can_use_it():
    layer = norm_of(OptionalNorm, with_scale=False)
    before = dict(vars(layer))
    expected = layer(X) * ROOT
    torch.testing.assert_close(swap(layer, "golden")(X), expected)
    assert vars(unswap(copy.deepcopy(layer), fold=False)).keys() == before.keys()
    torch.testing.assert_close(unswap(layer)(X), expected)


@pytest.mark.parametrize(
    ("cls", "options", "why"),
    [
        (GatedNorm, {}, "its second argument is not a silu gate"),
        (HalfStatisticsNorm, {}, "it rounds between its steps for bfloat16 input"),
        (LateEpsNorm, {}, "its eps is not added to the variance inside the root"),
        (
            ScaledNorm,
            {"with_scale": False},
            "it has no weight, into which unswap could fold",
        ),
        (
            LlamaNorm,
            {"width": (2, 8)},
            "its weight has 2 dimensions, and its rows have one",
        ),
    ],
    ids=str,
)
def test_a_layer_with_another_forward_or_weight_is_left_and_plan_says_why(
    cls, options, why
):
    (row,) = plan(norm_of(cls, **options))
    assert row.becomes is None
    assert row.note.removeprefix("nothing to do: ").startswith(why)


def test_a_layer_with_a_bias_is_left():
    layer = norm_of(OptionalNorm)
    layer.bias = nn.Parameter(torch.ones(8))
    assert "it has a bias, and normplug's RMSNorm has none" in plan(layer).rows[0].note


def test_a_probe_ignores_the_default_device_and_dtype(layer):
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.inference_mode():
            assert plan(layer).rows[0].becomes
    finally:
        torch.set_default_dtype(default)


LIBRARY = [
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"),
    ("transformers.models.t5.modeling_t5", "T5LayerNorm"),
    ("transformers.models.gemma.modeling_gemma", "GemmaRMSNorm"),
    ("diffusers.models.normalization", "RMSNorm"),
    ("diffusers.models.normalization", "FP32LayerNorm"),
]


@pytest.mark.parametrize(("module", "name"), LIBRARY)
def test_a_librarys_own_norm_is_swapped_and_pickled(module, name):
    pytest.importorskip(module.partition(".")[0])
    layer = norm_of(getattr(import_module(module), name), 8, eps=1e-5)
    expected = layer(X)
    assert torch.equal(swap(layer, "standard")(X), expected)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(layer, protocol))) is type(layer)
