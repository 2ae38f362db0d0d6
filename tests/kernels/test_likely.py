"""A model's first call predicts the kernels of the whole step, which are few."""

import gc

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
torchvision = pytest.importorskip("torchvision")

import normplug  # noqa: E402
from fuse_cases import skip_if_not_followed  # noqa: E402
from normplug import functional, native  # noqa: E402
from normplug._kernels import ahead, launch  # noqa: E402
from normplug._ops import batch_norm, batch_norm_pool, call, eligible, likely, plans  # noqa: E402
from normplug._ops.batch_norm import BatchNormSpec  # noqa: E402
from normplug._ops.group_norm import GroupNormSpec  # noqa: E402
from normplug._ops.likely import Call, Operations  # noqa: E402
from normplug._ops.row_norms import LayerNormSpec  # noqa: E402
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
    """A function that runs a model's training step as on an H100, or its forward in evaluation.

    It computes nothing, and returns the kernels requested ahead and those launched, each once and
    in order.
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
    for module in (batch_norm, batch_norm_pool):
        monkeypatch.setattr(module, "machine_of", lambda x, alone=True: (132, True))
    monkeypatch.setattr(
        nn.Conv2d, "_conv_forward", lambda self, x, w, bias: Convolution.apply(x, w, self)
    )
    call._stored.clear()
    _forget_layers()

    def run_model(model, x, fuse, training=True):
        model = model.to("meta")
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.to(torch.bfloat16)
        normplug.swap(model, backend="triton", autocast_output="low")
        if fuse:
            normplug.fuse(model)
        with torch.set_grad_enabled(training):
            y = model.train(training)(x.requires_grad_(training))
        if training:
            y.sum().backward()
        return list(asked), list(launched)

    yield run_model
    call._stored.clear()
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
    asked, launched = step(model, images(batch), fuse)
    if fuse:
        skip_if_not_followed(model)
    assert len(launched) <= most[fuse]
    assert set(launched[1:]) <= set(asked)
    assert len(set(asked) - set(launched)) <= 6
    # After the first layer's kernels, all forwards come before the backwards.
    forwards = ["_forward{" in key for key in asked[3:] if key in launched]
    assert forwards == sorted(forwards, reverse=True)


def images(batch):
    x = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    return x.to(memory_format=torch.channels_last)


def pyramid(norm):
    """Convolutions that halve the image and double the channels, with norms and SiLU."""
    widths = (3, 64, 128, 256)
    stages = [(nn.Conv2d(a, b, 3, 2, 1), norm(b)) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*(layer for stage in stages for layer in (*stage, nn.SiLU())))


class Block(nn.Module):
    """Two branches of a transformer, in half precision. Norms are before them, or after the sums.

    The rows of the first branch's result may lie in the order of an attention's.
    """

    def __init__(self, norm, before, permuted=False):
        super().__init__()
        self.norm1, self.norm2 = norm(256), norm(256)
        self.linear1, self.linear2 = nn.Linear(256, 256), nn.Linear(256, 256)
        self.before, self.permuted = before, permuted

    def mix(self, x):
        if self.permuted:
            return self.linear1(x.transpose(0, 1)).transpose(0, 1)
        return self.linear1(x)

    def forward(self, x):
        if self.before:
            x = x + self.mix(self.norm1(x))
            y = self.norm2(x)
            x = x + self.linear2(y)
        else:
            x = self.norm1(x + self.mix(x))
            x = self.norm2(x + self.linear2(x))
        return x


def blocks(*options):
    return nn.Sequential(*(Block(*options) for _ in range(2)))


# A model; the dtype of its input if that is text; how many kernels a fused step launches that were
# requested, and that were not; and how many are requested but not launched. The kernel that is not
# requested is the first that reads rows in another order.
FAMILIES = {
    "GroupNorm": (lambda: pyramid(lambda c: nn.GroupNorm(32, c)), None, 6, 0, 1),
    "InstanceNorm": (lambda: pyramid(nn.InstanceNorm2d), None, 4, 0, 1),
    "LayerNorm, pre-norm": (lambda: blocks(nn.LayerNorm, True), torch.float32, 4, 0, 5),
    "LayerNorm, post-norm": (lambda: blocks(nn.LayerNorm, False), torch.bfloat16, 2, 0, 1),
    "LayerNorm, attention": (lambda: blocks(nn.LayerNorm, True, True), torch.float32, 5, 1, 6),
    "RMSNorm": (lambda: blocks(nn.RMSNorm, True), torch.float32, 4, 0, 5),
}


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_predicts_its_kernels(step, monkeypatch, name):
    make, dtype, *counts = FAMILIES[name]
    x = images(16) if dtype is None else torch.empty(64, 128, 256, dtype=dtype, device="meta")
    monkeypatch.setattr(functional, "autocast_dtype", lambda x: torch.bfloat16)
    asked, launched = map(set, step(make(), x, True))
    found = [len(launched & asked), len(launched - asked), len(asked - launched)]
    assert found == counts


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["ResNet-50", "GroupNorm", "LayerNorm, pre-norm"])
def test_an_evaluation_that_comes_first_requests_its_kernels(step, monkeypatch, name):
    monkeypatch.setattr(functional, "autocast_dtype", lambda x: torch.bfloat16)
    make, dtype, *_ = FAMILIES.get(name, (torchvision.models.resnet50, None))
    x = images(16) if dtype is None else torch.empty(64, 128, 256, dtype=dtype, device="meta")
    asked, launched = step(make(), x, True, training=False)
    assert set(launched) <= set(asked)
    assert len(asked) - len(launched) <= 3


@pytest.fixture
def layers():
    """A function that creates a layer and notes its call; the layers stay alive."""
    _forget_layers()
    kept = []

    def note(spec, *call):
        kept.append(nn.Identity())
        likely.note(kept[-1], Call(spec, *call))

    yield note
    _forget_layers()


TRAINING = BatchNormSpec(True, 0.1, 1e-5, 1.0)


def shapes(x, channels, spec=TRAINING):
    """The shapes that are expected after a first call of x, on the meta device."""
    weight = torch.empty(channels, device="meta", requires_grad=True)
    t = Tensors(x.requires_grad_(), None, weight, tracked=torch.tensor(0))
    plan = spec.plan(t)
    calls = likely.calls_after(t, spec, True)
    return [tuple(o.x.shape) for call in calls for _, o in plan.likely_plans(t, call)]


def test_layers_with_far_more_or_fewer_values_than_the_first_are_not_expected(layers):
    layers(BatchNormSpec, (16,))
    layers(BatchNormSpec, (2048,))
    found = shapes(torch.empty(8, 256, 16, 16, device="meta"), 256)
    assert found == [(8, 16, 16, 16), (8, 2048, 8, 8), (8, 2048, 4, 4), (8, 2048, 2, 2)]


def test_layers_are_expected_at_the_lowest_resolution_of_a_volume(layers):
    layers(BatchNormSpec, (320,))
    found = shapes(torch.empty(2, 32, 128, 128, 128, device="meta"), 32)
    assert found[-1] == (2, 320, 4, 4, 4)


def test_rows_of_images_are_expected_at_half_the_size_and_those_of_sequences_are_not(layers):
    layers(LayerNormSpec, (64,))
    spec = LayerNormSpec((32,), 0.1, 1e-5, 1.0, None, "low")
    images, sequences = (torch.empty(8, *n, 10, 32, device="meta") for n in ((14,), ()))
    assert shapes(images, 32, spec) == [(8, 14, 10, 64), (8, 7, 5, 64), (8, 3, 2, 64)]
    likely._seen.clear()
    assert shapes(sequences, 32, spec) == [(8, 10, 64)]


def test_a_call_is_expected_once(layers):
    layers(BatchNormSpec, (64,))
    layers(BatchNormSpec, (64,))
    layers(GroupNormSpec, (64,))
    assert shapes(torch.empty(8, 64, device="meta"), 64) == [(8, 64)]
    assert shapes(torch.empty(8, 64, device="meta"), 64) == []


def test_a_model_that_is_gone_is_not_expected():
    _forget_layers()
    model = normplug.swap(nn.Sequential(nn.BatchNorm1d(64)))
    assert list(likely._calls.values()) == [Call(BatchNormSpec, (64,))]
    del model
    gc.collect()
    assert not likely._calls


class Untraceable(nn.Module):
    """A forward that is edited, since it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.last = nn.GroupNorm(2, 8), nn.SiLU(), nn.LayerNorm(8)

    def forward(self, x, **others):
        y = self.norm(x)
        y = self.act(y)
        return self.last(x + y) if others else y


@pytest.mark.parametrize(
    ("model", "operations"),
    [
        (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()], [Operations("silu")]),
        (lambda: [Block(nn.LayerNorm, True)], [Operations(), Operations(residual=True)]),
        (
            lambda: [nn.Conv2d(3, 8, 3), torchvision.ops.Permute([0, 2, 3, 1]), nn.LayerNorm(8)],
            [Operations(input_bias=True)],
        ),
        (lambda: [Untraceable()], [Operations("silu"), Operations(residual=True)]),
    ],
    ids=["activation", "addition", "bias", "edited"],
)
def test_fuse_notes_how_layers_will_be_called(model, operations):
    _forget_layers()
    model = normplug.fuse(normplug.swap(nn.Sequential(*model())))
    skip_if_not_followed(model)
    assert [call.operations for call in likely._calls.values()] == operations
