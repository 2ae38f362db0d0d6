"""Fused models under torch.compile, torch.export and torch.fx."""

import copy

import pytest
import torch
from torch import nn

import routes
from accuracy import assert_no_worse
from fuse_cases import (
    ROWS,
    ZOO,
    Block,
    Depthwise,
    Encoder,
    Parts,
    PreNorm,
    Resnet,
    X,
    assert_same_step,
    layer_norm_2d,
    outcome,
    swapped,
    twins,
)
from normplug import fuse

WITH_AND_WITHOUT_RECOMPUTE = [False, pytest.param(True, marks=routes.NEEDS_RECOMPUTE)]


class Edited(PreNorm):
    """Not traced, since its forward takes keyword arguments."""

    def forward(self, x, **options):
        x = x + self.drop(self.mix(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("recompute", WITH_AND_WITHOUT_RECOMPUTE)
def test_a_fused_model_compiles_to_one_graph(recompute, calls):
    models = [(nn.Sequential(Block(), Block()), X), (Encoder(), ROWS)]
    if not recompute:
        models += [(nn.Sequential(Resnet(), Resnet()), X), (Edited(), ROWS)]
    for model, x in models:
        model, plain = twins(model, recompute=recompute)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for training in (True, False):
            calls.clear()
            assert_same_step(compiled, plain, x, training=training)
            assert len(calls) == (1 if isinstance(plain, Edited) else 4)
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", WITH_AND_WITHOUT_RECOMPUTE)
def test_exported_traced_and_mapped_like_the_unfused_model(recompute):
    edited, unfused = twins(Edited().eval(), recompute=recompute)
    exported = torch.export.export(edited, (ROWS,)).module()
    assert torch.equal(exported(ROWS), unfused(ROWS))
    model, plain = twins(Block().eval(), recompute=recompute)
    expected = plain(X)
    assert torch.equal(torch.export.export(model, (X,)).module()(X), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(X), expected)
    parameters = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, parameters, (X,)), expected)
    torch.testing.assert_close(torch.vmap(model)(X[None])[0], expected)


def operators_for_a_compiler(model, x):
    """Count the norms' operators in the graph that a compiler gets for `model(x)`."""
    operators = []

    def look(graph_module, inputs):
        calls = (n for n in graph_module.graph.nodes if n.op == "call_function")
        targets = [str(n.target) for n in calls]
        operators.extend(t for t in targets if "normplug" in t and "convolution" not in t)
        return graph_module.forward

    torch.compile(model, backend=look, fullgraph=True)(x)
    return len(operators)


@pytest.mark.gpu
def test_a_compiler_gets_an_operator_for_isolated_norms_and_for_added_biases(monkeypatch):
    biased = fuse(swapped(nn.Sequential(Depthwise())).float().cuda())
    small = torch.randn(2, 8, 64, 64, device="cuda")
    assert operators_for_a_compiler(biased, small) == 0
    routes.use_operators_for_small_inputs(monkeypatch)
    assert operators_for_a_compiler(biased, torch.randn(2, 8, 32, 32, device="cuda")) == 1
    model = fuse(swapped(ZOO["resnet18"][0]()).float().cuda())
    images = torch.randn(2, 3, 64, 64).cuda()
    assert operators_for_a_compiler(model, images) == 0  # Inductor chooses the layout
    model = model.to(memory_format=torch.channels_last)
    found = operators_for_a_compiler(model, images.to(memory_format=torch.channels_last))
    assert found == len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)])


@pytest.mark.gpu
def test_a_compiler_gets_an_operator_for_a_norm_of_channels_last_images(monkeypatch):
    images = torch.randn(2, 8, 64, 64, device="cuda")
    model = swapped(nn.Sequential(layer_norm_2d())).float().cuda()
    channels_last = images.to(memory_format=torch.channels_last)
    assert operators_for_a_compiler(model, channels_last) == 0  # small
    routes.use_operators_for_small_inputs(monkeypatch)
    assert operators_for_a_compiler(model, channels_last[:1]) == 1
    assert operators_for_a_compiler(model, images[:1]) == 0  # channels are not contiguous
    rows = swapped(nn.Sequential(nn.LayerNorm(8))).float().cuda()  # an ordinary LayerNorm
    assert operators_for_a_compiler(rows, channels_last.permute(0, 2, 3, 1)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_layer_norm_operators_are_as_close_to_float64_as_unfused(
    memory_format, monkeypatch
):
    routes.use_operators_for_small_inputs(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact = swapped(nn.Sequential(layer_norm_2d(), Depthwise(), nn.ReLU())).cuda()
    x = torch.randn(4, 8, 16, 16, device="cuda").to(memory_format=memory_format)
    ours, theirs = (copy.deepcopy(exact).float() for _ in range(2))
    ours = torch.compile(fuse(ours), fullgraph=True)
    truth = outcome(exact, x.double())
    theirs = outcome(theirs, x)
    for name, value in outcome(ours, x).items():
        if value.is_floating_point():
            # The error of sums that cancel depends on the order of their terms.
            assert_no_worse(name, value, theirs[name], truth[name], spare=1e-4)


class Small(Parts):
    def forward(self, x):
        return self.act(self.norm(x) + x)


def test_more_fused_classes_can_be_compiled_than_a_function_may_be_recompiled():
    torch.compiler.reset()
    for _ in range(10):
        cls = type("Own", (Small,), {})
        model, plain = twins(cls(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), plain(X))
    torch.compiler.reset()
