"""Fused models that recompute norms' outputs in the backward."""

import copy

import pytest
import torch
from torch import nn

import recompute_cases
import routes
from fuse_cases import Block, X, assert_same_step, outcome, swapped, torchvision_model
from graphs import captured
from normplug import fuse
from normplug._convert import fused_modules
from normplug._ops import recompute


@routes.NEEDS_RECOMPUTE
def test_without_kernels_every_convolution_saves_its_input():
    model = fuse(swapped(nn.Sequential(Block(), Block())), recompute=True)
    plain = fuse(copy.deepcopy(model))
    convolutions = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert (
        recompute_cases.kept(model, X) == recompute_cases.kept(plain, X) == convolutions
    )
    assert_same_step(model, plain, X)


def test_recompute_is_refused_if_torch_cannot_report_saved_tensor_hooks(monkeypatch):
    monkeypatch.setattr(recompute, "AVAILABLE", False)
    model = swapped(Block())
    with pytest.raises(
        NotImplementedError, match="normplug.fuse: recompute needs torch 2.8"
    ):
        fuse(model, recompute=True)
    assert not fused_modules(model)


def memory_of_a_step(model, x, low):
    """Return the bytes that are held after the forward, and the peak of the whole step."""
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", low, enabled=low is not None):
        y = model(x)
    held = torch.cuda.memory_allocated() - before
    y.sum().backward()
    return held, torch.cuda.max_memory_allocated() - before


def resnet18(memory_format):
    """A ResNet-18 for small images, whose steps on a GPU are reproducible bit for bit."""
    model = torchvision_model("resnet18")
    model.maxpool = nn.Identity()
    return model.to("cuda", memory_format=memory_format)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_recomputed_outputs_are_not_held_on_the_gpu_and_change_no_bit(
    memory_format, low, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ours, plain = recompute_cases.twins(resnet18(memory_format))
    x = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=memory_format)
    recompute_cases.check_same(ours, plain, x, low, steps=2)
    recomputed = [
        n for n, m in plain.named_modules() if isinstance(m, nn.Conv2d) and "conv2" in n
    ]
    every = recompute_cases.kept(plain, x, low)
    assert every - recompute_cases.kept(ours, x, low) >= set(recomputed)
    dropped = []
    handles = [
        plain.get_submodule(n).register_forward_pre_hook(
            lambda m, a: dropped.append(a[0].nbytes)
        )
        for n in recomputed
    ]
    held, peak = memory_of_a_step(plain, x, low)
    our_held, our_peak = memory_of_a_step(ours, x, low)
    for handle in handles:
        handle.remove()
    assert held - our_held >= sum(dropped) > 0
    assert our_peak < peak


@pytest.mark.gpu
def test_recomputing_a_layer_norms_output_on_the_gpu_changes_no_bit():
    ours, plain = recompute_cases.twins(recompute_cases.Feed(256).cuda())
    x = torch.randn(16, 100, 256, device="cuda")
    recompute_cases.check_same(ours, plain, x, steps=2)
    held, our_held = (memory_of_a_step(model, x, None)[0] for model in (plain, ours))
    assert held - our_held >= x.nbytes
    recomputed = recompute_cases.kept(plain, x) - recompute_cases.kept(ours, x)
    assert recomputed == {"mlp.0"}


@pytest.mark.gpu
def test_normalised_values_take_half_of_the_memory_of_the_sum_on_the_gpu():
    model = recompute_cases.Feed(256).cuda()
    x = torch.randn(16, 100, 256, device="cuda") + 30
    low = torch.bfloat16
    exact = outcome(copy.deepcopy(model).double(), x.double())
    ours, plain = recompute_cases.twins(model)
    recompute_cases.check_as_exact(ours, plain, exact, x, low)
    held, our_held = (memory_of_a_step(model, x, low)[0] for model in (plain, ours))
    # Neither the output, of two bytes a value, nor two of the four bytes of the sum.
    assert held - our_held >= x.nbytes


@pytest.mark.gpu
def test_a_cuda_graph_recomputes_at_each_replay(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    layers = recompute_cases.convolutions(nn.ReLU(), nn.GELU(), width=32)
    ours, plain = recompute_cases.twins(layers.cuda())
    x = torch.randn(8, 32, 28, 28, device="cuda")

    def step(model):
        y = model(x)
        return torch.autograd.grad(y.square().sum(), list(model.parameters()))

    graph, got = captured(step, ours)
    for _ in range(3):
        x.normal_()
        graph.replay()
        for a, b in zip(got, step(plain), strict=True):
            assert torch.equal(a, b)
