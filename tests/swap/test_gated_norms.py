"""RMSNorms with a gate: which are recognised, and what they compute when they are swapped."""

import copy
import pickle
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from normplug import check, fuse, plan, swap, target_variance, unswap
from normplug.modules.probe import Probe, averages
from swap_cases import one_graph

ROOT = target_variance("golden") ** 0.5
WIDTH = 12


class Gated(nn.Module):
    """As hybrid models have it after linear attention: the gate comes last."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = eps

    def forward(self, x, gate):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        h = self.weight * h.to(x.dtype)
        return (h * F.silu(gate.float())).to(x.dtype)


class GroupedGated(nn.Module):
    """As state-space models have it: the gate comes first, and rows are cut into groups."""

    def __init__(self, group_size=4, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.variance_epsilon = eps
        self.group_size = group_size

    def forward(self, x, gate=None):
        h = x.float()
        if gate is not None:
            h = h * F.silu(gate.float())
        groups = h.unflatten(-1, (-1, self.group_size))
        variance = groups.pow(2).mean(-1, keepdim=True)
        h = (groups * torch.rsqrt(variance + self.variance_epsilon)).flatten(-2)
        return self.weight * h.to(x.dtype)


class OtherNames(Gated):
    """Its arguments have the names of variables in the forward that a swap gives it."""

    def forward(self, y, node):
        return super().forward(y, node)


KNOWN = [(Gated, {}), (GroupedGated, {}), (GroupedGated, {"group_size": WIDTH})]


@pytest.fixture(params=KNOWN, ids=str)
def layer(request):
    cls, options = request.param
    layer = cls(**options)
    nn.init.normal_(layer.weight, 0.5, 0.3)
    return layer


def inputs_of(dtype=torch.float32):
    return (3 + torch.randn(2, 5, WIDTH)).to(dtype), torch.randn(2, 5, WIDTH).to(dtype)


def test_plan_says_what_was_recognised(layer):
    (row,) = plan(layer)
    assert row.note == (
        "recognised by what it computes: an RMSNorm with a gate, bit for bit"
    )


@pytest.mark.parametrize(("cls", "names"), [(Gated, "x gate"), (OtherNames, "y node")])
def test_arguments_may_be_passed_by_their_names(cls, names):
    inputs = dict(zip(names.split(), inputs_of(), strict=True))
    layer = cls()
    expected = layer(**inputs)
    assert torch.equal(swap(layer)(**inputs), expected)
    assert type(layer).__module__ == "normplug.adapters"
    first, second = inputs.values()
    assert torch.equal(layer(second, first), unswap(layer)(second, first))


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_standard_is_the_layer_bit_for_bit(layer, dtype, weight):
    inputs = inputs_of(dtype)
    layer.to(weight)
    expected = layer(*inputs)
    got = swap(layer)(*inputs)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_gradients_are_those_of_the_layer(layer):
    leaves = [t.requires_grad_() for t in (*inputs_of(), layer.weight)]
    seed = torch.randn(2, 5, WIDTH)
    expected = torch.autograd.grad(layer(*leaves[:2]), leaves, seed)
    swap(layer, "golden")
    for got, wanted in zip(
        torch.autograd.grad(layer(*leaves[:2]), leaves, seed), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted * ROOT)


def test_every_tool_works_in_mode_golden_and_unswap_restores_the_layer(layer):
    x, gate = inputs_of()
    stock = copy.deepcopy(layer)
    swap(layer, "golden", track_running_stats=True)
    check(layer)
    expected = layer(x, gate=gate)
    torch.testing.assert_close(expected, stock(x, gate) * ROOT)
    torch.testing.assert_close(one_graph(copy.deepcopy(layer))(x, gate), expected)
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is type(layer)
    assert torch.equal(again(x, gate), expected)
    torch.testing.assert_close(unswap(copy.deepcopy(layer))(x, gate), expected)
    unswap(layer, fold=False)
    assert type(layer) is type(stock)
    assert vars(layer).keys() == vars(stock).keys()


@pytest.mark.parametrize("shape", [(WIDTH,), (2, 1, WIDTH), (5, 1), (3, 2, 5, WIDTH)])
def test_the_gate_may_be_of_many_rows_or_values(layer, shape):
    leaves = [inputs_of()[0].requires_grad_(), torch.randn(shape, requires_grad=True)]
    expected = layer(*leaves)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, seed)
    y = swap(layer)(*leaves)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, seed), gradients)


def test_the_gate_may_be_left_out():
    layer = GroupedGated()
    x, _ = inputs_of()
    expected = layer(x)
    assert torch.equal(swap(layer)(x), expected)


def test_what_is_measured_is_the_norm_without_its_gate(layer):
    x, gate = inputs_of()
    swap(layer, "golden")
    expected = layer(x, gate)
    layer._probe = Probe()
    assert torch.equal(layer(x, gate), expected)
    moment, plain, *_ = averages([layer._probe])[0].tolist()
    h = x if isinstance(layer, Gated) else x * F.silu(gate)
    assert moment == pytest.approx(h.square().mean().item(), rel=1e-4)
    assert plain == pytest.approx(ROOT**2, rel=1e-3)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, gate):
        return self.norm(x + gate, gate).relu()


@pytest.mark.filterwarnings("ignore:normplug.fuse")
def test_fuse_and_fx_leave_it_one_call_with_its_gate(layer):
    inputs = inputs_of()
    model = swap(Block(layer), "golden")
    expected = model(*inputs)
    graph = fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes].count("call_module") == 1
    assert torch.equal(graph(*inputs), expected)
    fuse(model)
    assert torch.equal(model(*inputs), expected)


class SigmoidGated(Gated):
    def forward(self, x, gate):
        h = x.float()
        h = self.weight.float() * h * (h.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return (h * gate.float().sigmoid()).to(x.dtype)


class SelfGated(GroupedGated):
    def forward(self, x, gate=None):
        return super().forward(x, x if gate is None else gate)


class GateDetached(Gated):
    def forward(self, x, gate):
        return super().forward(x, gate.detach())


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (SigmoidGated, "its second argument is not a silu gate"),
        (SelfGated, "it computes something else without a gate"),
        (GateDetached, "its gradients are not those of its result"),
    ],
)
def test_a_class_with_another_gate_stays_and_plan_says_why(cls, why):
    (row,) = plan(cls())
    assert row.becomes is None
    assert row.note == f"{why}: change its forward, then swap"


LIBRARY = [
    ("qwen3_next", "Qwen3NextRMSNormGated", {}),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}),
    ("mamba2", "MambaRMSNormGated", {"group_size": 4}),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 6}),
    ("bamba", "BambaRMSNormGated", {"group_size": WIDTH}),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 3}),
]


@pytest.mark.parametrize(("model", "name", "options"), LIBRARY)
def test_the_ones_of_transformers_are_swapped_and_pickled(model, name, options):
    pytest.importorskip("transformers")
    try:
        cls = getattr(
            import_module(f"transformers.models.{model}.modeling_{model}"), name
        )
        layer = cls(WIDTH, **options)
    except (AttributeError, ImportError, TypeError):
        pytest.skip(f"this version of transformers has another {name}")
    inputs = inputs_of()
    expected = layer(*inputs)
    swap(layer)
    assert type(layer) is not cls
    assert torch.equal(layer(*inputs), expected)
    assert type(pickle.loads(pickle.dumps(layer))) is type(layer)
