"""Norms written by hand: which are recognised by what they compute, and which stay."""

import copy
import inspect
import pickle
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normplug import check, fuse, plan, swap, swapped, target_variance, unswap
from normplug.adapters import behaviour
from normplug.modules import TargetVarianceNorm
from swap_cases import assert_frozen, frozen, one_graph

ROOT = target_variance("golden") ** 0.5
WIDTH = 12
CALLS = []


class WithWeight(nn.Module):
    """What a weight and an eps need."""

    def __init__(self, width=WIDTH, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps


class LlamaNorm(WithWeight):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


class OneNorm(nn.Module):
    """Its weight starts at 0, its eps has a name of its own."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.tiny = 1e-3

    def forward(self, x):
        h = x.float()
        h = h / torch.sqrt((h * h).sum(-1, keepdim=True) / h.shape[-1] + self.tiny)
        return (h * (1 + self.scale.float())).to(x.dtype)


class Unnamed(nn.Module):
    """As nanoGPT's: eps is a constant, and the bias may be None."""

    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class WithBuffer(nn.Module):
    """A bias that does not train."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("beta", torch.zeros(WIDTH))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


class Float32Norm(nn.Module):
    """In steps, in float32, whatever comes."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        h = x.to(torch.float32)
        h = h - h.mean(-1, keepdim=True)
        h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (h * self.g.float() + self.b.float()).to(x.dtype)


class ClipNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class ImageNorm(nn.Module):
    """As ConvNeXt's: of images with channels first, or of rows."""

    def __init__(self, layout="channels_first"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.eps = 1e-6
        self.layout = layout

    def forward(self, x):
        if self.layout == "channels_first":
            x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2) if self.layout == "channels_first" else x


class SpeechNorm(nn.Module):
    """As VITS': the channels are dimension 1, however many dimensions there are."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.beta = nn.Parameter(torch.zeros(WIDTH))
        self.layout = "channels_first"

    def forward(self, x):
        x = x.transpose(1, -1)
        x = F.layer_norm(x, (WIDTH,), self.gamma, self.beta, 1e-5)
        return x.transpose(1, -1)


class ReadOnlyEps(LlamaNorm):
    eps = property(lambda self: 1e-5)

    def __init__(self):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(WIDTH))


class WithoutAutocast(Unnamed):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


class TorchNorm(nn.Module):
    def __init__(self, eps=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


KNOWN = [
    (LlamaNorm, {}, "an RMSNorm, bit for bit"),
    (OneNorm, {}, "an RMSNorm, up to rounding"),
    (Unnamed, {}, "a LayerNorm, bit for bit"),
    (Unnamed, {"bias": False}, "a LayerNorm, bit for bit"),
    (WithBuffer, {}, "a LayerNorm, bit for bit"),
    (Float32Norm, {}, "a LayerNorm, up to rounding"),
    (ClipNorm, {}, "a LayerNorm"),
    (ImageNorm, {}, "a LayerNorm, bit for bit"),
    (ImageNorm, {"layout": "last"}, "a LayerNorm, bit for bit"),
    (SpeechNorm, {}, "a LayerNorm, bit for bit"),
    (ReadOnlyEps, {}, "an RMSNorm, bit for bit"),
]
# In older versions of torch, `F.rms_norm` returns float32 for a float32 weight, and so it stays.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    RESULT = F.rms_norm(torch.ones(1, 8).bfloat16(), (8,), torch.ones(8))
if RESULT.dtype == torch.bfloat16:
    KNOWN += [
        (TorchNorm, {}, "an RMSNorm, bit for bit"),
        (TorchNorm, {"eps": 1e-4}, "an RMSNorm, bit for bit"),
    ]


def made(cls, **options):
    """A layer with random weights, and an input whose rows are far from zero."""
    layer = cls(**options)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.normal_(0.5, 0.3)
    return layer


def input_of(layer):
    x = 3 + 2 * torch.randn(2, 4, 5, WIDTH)
    return (
        x.permute(0, 3, 1, 2) if getattr(layer, "layout", "") == "channels_first" else x
    )


@pytest.fixture(params=KNOWN, ids=lambda case: f"{case[0].__name__}{case[1]}")
def layer(request):
    torch.manual_seed(random.randrange(1000))
    cls, options, _ = request.param
    return made(cls, **options)


def test_the_input_may_be_passed_by_the_name_that_the_class_gives_it(layer):
    (name,) = inspect.signature(layer.forward).parameters
    x = {name: input_of(layer)}
    expected = layer(**x)
    torch.testing.assert_close(swap(layer)(**x), expected)


@pytest.mark.parametrize(("cls", "options", "kind"), KNOWN, ids=str)
def test_plan_says_what_was_recognised(cls, options, kind):
    (row,) = plan(made(cls, **options))
    assert row.becomes == cls.__name__
    assert row.note.startswith(f"recognised by what it computes: {kind}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_standard_is_the_layer_itself(layer, dtype):
    is_exact = "bit for bit" in plan(layer).rows[0].note
    x = input_of(layer).to(dtype)
    if not isinstance(layer, ClipNorm):  # which takes a weight in float32 only
        layer.to(dtype)
    expected = layer(x)
    got = swap(layer)(x)
    assert got.dtype == expected.dtype
    if is_exact:
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, expected)
    for rows in (x * 1e-3, torch.zeros_like(x)):
        now = layer(rows)
        torch.testing.assert_close(now, unswap(copy.deepcopy(layer))(rows))


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_channels_may_be_the_second_of_any_number_of_dimensions(dimensions):
    layer = made(SpeechNorm)
    x = 3 + torch.randn(2, WIDTH, *range(3, dimensions + 1))
    assert x.dim() == dimensions
    expected = layer(x)
    assert torch.equal(swap(layer)(x), expected)


def test_every_tool_works_in_mode_golden_and_unswap_restores_the_layer(layer):
    x = input_of(layer)
    model = nn.Sequential(layer)
    stock = copy.deepcopy(layer)
    bias = layer(torch.zeros_like(x))
    keys = list(model.state_dict())
    swap(model, "golden", track_running_stats=True)
    assert list(model.state_dict()) == keys
    assert check(model, x)
    expected = model(x)
    torch.testing.assert_close(expected, (stock(x) - bias) * ROOT + bias)
    torch.testing.assert_close(one_graph(model)(x), expected)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again[0]) is type(layer)
        assert torch.equal(again(x), expected)
    torch.testing.assert_close(unswap(copy.deepcopy(model))(x), expected)
    unswap(model, fold=False)
    assert type(layer) is type(stock)
    assert vars(layer).keys() == vars(stock).keys()
    assert torch.equal(model(x), stock(x))
    with swapped(model, "golden", preserve_output=True):
        torch.testing.assert_close(model(x), stock(x))
    torch.testing.assert_close(layer.state_dict(), stock.state_dict())


def test_gradients_are_those_of_the_layer(layer):
    x = input_of(layer).requires_grad_()
    seed = torch.randn_like(x)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], seed)
    swap(layer)
    got = torch.autograd.grad(layer(x), [x, *layer.parameters()], seed)
    torch.testing.assert_close(got, expected)


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = norm

    def forward(self, x):
        return self.norm(x + self.linear(x))


@pytest.mark.parametrize("cls", [LlamaNorm, WithBuffer])
def test_fuse_adds_the_residual_in_the_same_call(cls):
    model = swap(Residual(made(cls)), "golden")
    x = torch.randn(3, WIDTH)
    expected = model(x)
    assert [row.note for row in plan(model)] == ["swapped already, mode golden"]
    torch.testing.assert_close(fuse(model)(x), expected)


@pytest.mark.parametrize(
    ("cls", "autocasts"),
    [(Unnamed, True), (ClipNorm, False), (LlamaNorm, False), (WithoutAutocast, False)],
)
def test_torchs_layer_norm_returns_float32_under_autocast_unless_it_is_cast(
    cls, autocasts
):
    assert swap(made(cls))._autocasts == autocasts


class Unbiased(WithWeight):
    def forward(self, x):
        d = x - x.mean(-1, keepdim=True)
        return self.weight * d / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


class OuterEps(WithWeight):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class Bounded(WithWeight):
    def forward(self, x):
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.weight


class Length(WithWeight):
    def forward(self, x):
        return self.weight * x * (x.pow(2).sum(-1, keepdim=True) + self.eps).rsqrt()


class Rough(WithWeight):
    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()


class Promoting(WithWeight):
    def forward(self, x):
        h = x.float()
        return self.weight * h * (h.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()


class Squares(WithWeight):
    def forward(self, x):
        x, mean = x.float(), x.float().mean(-1, keepdim=True)
        var = x.square().mean(-1, keepdim=True) - mean.square()
        return self.weight * (x - mean) * (var + self.eps).rsqrt()


class Detached(LlamaNorm):
    def _norm(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt().detach()


class WithoutGradients(LlamaNorm):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class DecoratedNorm(LlamaNorm):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Biased(LlamaNorm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.bias


class Doubling(LlamaNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class TrainsOtherwise(LlamaNorm):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1)


class TwoKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        dim = 1 if x.dim() == 4 and x.shape[1] == WIDTH else -1
        h = x * (x.pow(2).mean(dim, keepdim=True) + 1e-5).rsqrt()
        return h * (self.weight if dim == -1 else self.weight[:, None, None])


class MaskedNorm(LlamaNorm):
    def forward(self, x, mask, scale=1):
        return super().forward(x) * mask * scale


class CountingNorm(LlamaNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class LoggingNorm(LlamaNorm):
    def forward(self, x):
        CALLS.append(x)
        return super().forward(x)


class RecordingNorm(LlamaNorm):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return super().forward(x)


class NoisyNorm(LlamaNorm):
    def forward(self, x):
        return super().forward(x) + 0 * torch.rand_like(x)


class InPlaceNorm(LlamaNorm):
    def forward(self, x):
        return super().forward(x.mul_(1.0 + 2**-5))


class HookingNorm(LlamaNorm):
    def forward(self, x):
        self.weight.register_hook(lambda gradient: gradient)
        return super().forward(x)


class WithModeNorm(LlamaNorm):
    def __init__(self):
        super().__init__()
        self.mode = "fast"


class FailingNorm(LlamaNorm):
    def forward(self, x):
        raise RuntimeError("no")


class NanToZeroNorm(LlamaNorm):
    def forward(self, x):
        return super().forward(x).nan_to_num()


class LimitedNorm(LlamaNorm):
    def forward(self, x):
        return super().forward(x).clamp(-20, 20)


class HalfEpsNorm(WithWeight):
    def forward(self, x):
        eps = 1e-4 if x.dtype == torch.float16 else self.eps
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return h.type_as(x) * self.weight


class OneRowNorm(LlamaNorm):
    def forward(self, x):
        return super().forward(x) * (2 if x.shape[0] == 1 else 1)


class VideoNorm(Unnamed):
    def forward(self, x):
        if x.dim() == 5:  # a video with channels first
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)
        return super().forward(x)


class NeedsGradNorm(LlamaNorm):
    def forward(self, x):
        y = super().forward(x)
        return y if self.weight.requires_grad else 2 * y


class OnGpuNorm(LlamaNorm):
    def forward(self, x):
        return super().forward(x) * (2 if x.is_cuda else 1)


class ImportingNorm(LlamaNorm):
    def forward(self, x):
        import random

        random.random()
        return super().forward(x)


class DistributedNorm(LlamaNorm):
    def forward(self, x):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(x)
        return super().forward(x)


TOTAL = torch.zeros(1)


class TotalNorm(LlamaNorm):
    def forward(self, x):
        TOTAL.add_(1)
        return super().forward(x)


def with_an_empty_cell():
    class EmptyCellNorm(LlamaNorm):
        def forward(self, x):
            return later(super().forward(x))

    if CALLS:
        later = torch.relu  # never: the variable of the closure has no value
    return EmptyCellNorm


OTHERS = [
    (NanToZeroNorm, "it replaces nan by numbers"),
    (LimitedNorm, "it limits its weight or its result"),
    (HalfEpsNorm, "it rounds between its steps for float16 input with a float16 weight"),
    (OneRowNorm, "it computes something else for one row"),
    (VideoNorm, "the dimension that it normalises depends on the shape of its input"),
    (NeedsGradNorm, "it computes something else if its parameters are frozen"),
    (OnGpuNorm, "its forward uses is_cuda, which may do more than compute"),
    (ImportingNorm, "its forward uses random, which may do more than compute"),
    (DistributedNorm, "its forward uses distributed, which may do more than compute"),
    (TotalNorm, "its forward uses TOTAL, which may do more than compute"),
    (with_an_empty_cell(), "its forward uses later, which may do more than compute"),
    (Unbiased, "it divides the sum of squares by n - 1, not by n"),
    (OuterEps, "its eps is not added to the variance inside the root"),
    (Bounded, "it adds no eps to the variance"),
    (Length, "it divides by the length of a row, not by its root mean square"),
    (Rough, "it rounds between its steps for bfloat16 input with a bfloat16 weight"),
    (Promoting, "it returns float32 for bfloat16 input with a bfloat16 weight"),
    (Squares, "it is less precise for rows far from zero"),
    (Detached, "its gradients are not those of its result"),
    (WithoutGradients, "its result has no gradients"),
    (DecoratedNorm, "its forward is decorated"),
    (Biased, "it adds a bias, and normplug's RMSNorm has none"),
    (Doubling, "its rows have the mean square 4, not 1"),
    (TrainsOtherwise, "it computes something else in training"),
    (TwoKinds, "it takes rows and also images with channels first"),
    (MaskedNorm, "its forward takes more than one argument"),
    (CountingNorm, "its forward sets calls"),
    (LoggingNorm, "its forward uses CALLS, which may do more than compute"),
    (RecordingNorm, "its attribute seen is more than a constant"),
    (NoisyNorm, "it uses random numbers"),
    (InPlaceNorm, "its forward changes its input"),
    (HookingNorm, "its forward changes the layer"),
    (WithModeNorm, "its attribute mode has another meaning in normplug's layers"),
    (FailingNorm, "no normplug counterpart"),
]


@pytest.mark.parametrize(("cls", "why"), OTHERS)
@pytest.mark.filterwarnings("ignore:normplug.swap. nothing to swap")
def test_a_class_that_computes_something_else_stays_and_plan_says_why(cls, why):
    model = nn.Sequential(cls())
    before = frozen(model)
    (row,) = plan(model)
    assert row.becomes is None
    assert row.note.removeprefix("nothing to do: ").startswith(why)
    swap(model, "golden")
    assert_frozen(model, before)
    assert not CALLS


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.gamma


class DynamicTanh(LayerScale):
    def forward(self, x):
        return torch.tanh(0.5 * x) * self.gamma


class RandomScale(LayerScale):
    def forward(self, x):
        return x * self.gamma * torch.rand(())


@pytest.mark.parametrize("cls", [LayerScale, DynamicTanh, RandomScale])
def test_a_layer_that_does_not_normalise_is_not_listed(cls):
    assert len(plan(cls())) == 0


def test_a_probe_runs_once_for_a_class_and_its_settings(monkeypatch):
    probed = []
    formula_of = behaviour.formula_of
    monkeypatch.setattr(
        behaviour, "formula_of", lambda layer: probed.append(layer) or formula_of(layer)
    )

    class Fresh(LlamaNorm):
        pass

    model = nn.Sequential(*(Fresh() for _ in range(5)), Fresh(eps=1e-3), Fresh(width=16))
    for _ in range(2):
        plan(model)
    assert len(probed) == 3
    swap(model)
    assert [layer._eps for layer in model][4:] == [1e-5, 1e-3, 1e-5]


def test_a_probe_leaves_generators_and_defaults_alone():
    class Fresh(LlamaNorm):
        pass

    default = torch.get_default_dtype()
    state = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.inference_mode():
            layer = Fresh()
            assert plan(layer).rows[0].becomes
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.weight.is_meta


def test_a_class_that_was_patched_is_left(monkeypatch):
    layer = made(LlamaNorm)
    assert plan(layer).rows[0].becomes
    other = eval("lambda self, x: x", {})
    monkeypatch.setattr(LlamaNorm, "forward", other)
    assert "was replaced by other code" in plan(layer).rows[0].note


def test_a_patch_after_the_swap_is_noticed(monkeypatch):
    layer = swap(made(LlamaNorm))
    monkeypatch.setattr(LlamaNorm, "forward", eval("lambda self, x: x", {}))
    with pytest.raises(RuntimeError, match="was replaced by other code"):
        check(layer)


EPSILON = 1e-6


class GlobalEpsNorm(nn.Module):
    """An RMSNorm whose eps is a constant of the module that defines it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.factor = 1.0

    @property
    def epsilon(self):
        return EPSILON

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, True) + self.epsilon)
        return self.weight * y.type_as(x) * self.factor


def test_a_constant_that_has_changed_since_counts(monkeypatch):
    x = torch.randn(4, 8) / 100
    for eps in (1e-6, 1e-2, 1e-6):
        monkeypatch.setitem(globals(), "EPSILON", eps)
        stock = GlobalEpsNorm()
        layer = swap(nn.Sequential(copy.deepcopy(stock)))[0]
        assert isinstance(layer, TargetVarianceNorm)
        torch.testing.assert_close(layer(x), stock(x))


def test_an_attribute_that_is_set_after_the_swap_warns():
    layer = swap(nn.Sequential(GlobalEpsNorm()))[0]
    layer.factor = 1.0
    with pytest.warns(UserWarning, match="factor .* is now 2.0, and was 1.0"):
        layer.factor = 2.0
    layer.eval()
    assert unswap(nn.Sequential(layer))[0].factor == 2.0


def test_layers_of_one_class_may_compute_two_formulas():
    model = swap(nn.ModuleList([ImageNorm(), ImageNorm("last")]), "golden")
    first, last = model
    assert type(first) is not type(last)
    assert all(isinstance(layer, TargetVarianceNorm) for layer in model)
    unswap(model)
    assert type(first) is type(last) is ImageNorm
