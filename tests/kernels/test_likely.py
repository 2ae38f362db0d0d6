"""A model's first call predicts the kernels of the whole step, which are few."""

import gc

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
torchvision = pytest.importorskip("torchvision")

import normplug  # noqa: E402
from fuse_cases import skip_if_not_followed  # noqa: E402
from normplug import native  # noqa: E402
from normplug._kernels import ahead, launch  # noqa: E402
from normplug._ops import cache, eligible, plans  # noqa: E402
from normplug._ops.batch_norm import eager, likely, pooled  # noqa: E402
from normplug._ops.spec import Tensors  # noqa: E402


class Convolution(torch.autograd.Function):
    """The shapes of a convolution over bfloat16 in channels_last, on the meta device."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        sizes = [
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                x.shape[2:],
                layer.padding,
                layer.dilation,
                layer.kernel_size,
                layer.stride,
                strict=True,
            )
        ]
        y = x.new_empty(x.shape[0], len(weight), *sizes, dtype=torch.bfloat16)
        return y.to(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


@pytest.fixture
def step(monkeypatch):
    """A function that runs a model's training step as on an H100, without computing.

    It returns the kernels requested ahead and those launched, each once and in order.
    """
    asked, launched = {}, {}

    def run(self, stream, *tensors):
        launched.setdefault(self.job([t.dtype for t in tensors]).key)

    def expect(job):
        asked.setdefault(job.key)
        return True

    def start(self, *arguments, made=plans.Plan.__init__):
        made(self, *arguments)
        self.gpu = 0

    monkeypatch.setattr(launch.Launch, "__call__", run)
    monkeypatch.setattr(ahead, "expect", expect)
    monkeypatch.setattr(plans.Plan, "__init__", start)
    monkeypatch.setattr(plans, "current_device_index", lambda: 0)
    monkeypatch.setattr(plans, "current_raw_stream", lambda index: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(native, "_extension", None)
    monkeypatch.setattr(native, "_started", True)
    monkeypatch.setattr(eligible, "refusal_of_device", lambda *tensors: None)
    for module in (eager, pooled):
        monkeypatch.setattr(module, "machine_of", lambda x: (132, True))
    monkeypatch.setattr(
        nn.Conv2d, "_conv_forward", lambda self, x, w, bias: Convolution.apply(x, w, self)
    )
    cache._kept.clear()
    _forget_layers()

    def train(model, batch, fuse):
        model = model.to("meta")
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.to(torch.bfloat16)
        normplug.swap(model, backend="triton")
        if fuse:
            normplug.fuse(model)
        x = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
        model(x.to(memory_format=torch.channels_last)).sum().backward()
        return list(asked), list(launched)

    yield train
    cache._kept.clear()
    _forget_layers()


def _forget_layers():
    gc.collect()
    likely._calls.clear()
    likely._seen.clear()


# Batch size, and the most kernels that a step launches, swapped and fused. Some of the predicted
# kernels are never launched.
MODELS = {
    "mobilenet_v3_large": (256, 10, 21),
    "efficientnet_b0": (128, 14, 16),
    "regnet_y_1_6gf": (128, 6, 14),
    "densenet121": (64, 6, 10),
    "resnet50": (256, 6, 16),
}


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("fuse", [False, True], ids=["swap", "fuse"])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_call_requests_all_later_kernels_of_the_step(step, name, fuse):
    batch, *most = MODELS[name]
    model = torchvision.models.get_model(name)
    asked, launched = step(model, batch, fuse)
    if fuse:
        skip_if_not_followed(model)
    assert len(launched) <= most[fuse]
    assert set(launched[1:]) <= set(asked)
    assert len(set(asked) - set(launched)) <= 6
    # After the first layer's kernels, all forwards come before the backwards.
    forwards = ["_forward{" in key for key in asked[3:] if key in launched]
    assert forwards == sorted(forwards, reverse=True)


@pytest.fixture
def layers():
    """A function that creates a layer and notes its call; the layers stay alive."""
    _forget_layers()
    kept = []

    def note(*call):
        kept.append(nn.Identity())
        likely.note(kept[-1], likely.Call(*call))

    yield note
    _forget_layers()


def first_call(*shape, channels_last=False):
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight = torch.empty(shape[1], device="meta", requires_grad=True)
    return Tensors(x.requires_grad_(), None, weight, tracked=torch.tensor(0))


def test_layers_are_expected_at_the_first_ones_spatial_size_and_its_halves(layers):
    layers(64)
    found = [t.x.shape for t, _ in likely.after(first_call(8, 64, 28, 20))]
    assert found == [(8, 64, 28, 20), (8, 64, 14, 10), (8, 64, 7, 5)]


def test_layers_with_far_more_or_fewer_values_than_the_first_are_not_expected(layers):
    layers(16)
    layers(2048)
    found = [t.x.shape for t, _ in likely.after(first_call(8, 256, 16, 16))]
    assert found == [(8, 16, 16, 16), (8, 2048, 8, 8), (8, 2048, 4, 4), (8, 2048, 2, 2)]


@pytest.mark.parametrize("channels_last", [False, True])
def test_expected_calls_are_like_the_first_call_and_as_they_were_noted(layers, channels_last):
    layers(32, "relu", True)
    first = first_call(8, 64, 4, 4, channels_last=channels_last)
    t, activation = next(likely.after(first))
    assert activation == "relu"
    for each in (t.x, t.residual):
        assert each.shape == (8, 32, 4, 4)
        assert each.dtype == torch.bfloat16
        assert each.requires_grad
        assert each.is_contiguous() != channels_last
        assert each.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert (t.weight.shape, t.weight.requires_grad) == ((32,), True)
    assert t.bias is None


def test_a_call_is_expected_once(layers):
    layers(64)
    layers(64)
    first = first_call(8, 64)
    assert len(list(likely.after(first))) == 1
    assert not list(likely.after(first))


def test_a_model_that_is_gone_is_not_expected():
    _forget_layers()
    model = normplug.swap(nn.Sequential(nn.BatchNorm1d(64)))
    assert list(likely._calls.values()) == [likely.Call(64)]
    del model
    gc.collect()
    assert not likely._calls


def test_fuse_notes_how_layers_will_be_called():
    _forget_layers()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
    normplug.fuse(normplug.swap(model))
    assert list(likely._calls.values()) == [likely.Call(8, "silu", False)]
