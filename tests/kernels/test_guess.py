"""A model's first call of a norm requests the kernels of the whole step ahead."""

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
from normplug._ops import batch_norm_plan, call, can_run, guess, plans  # noqa: E402
from normplug.modules import group_norm, row_norms  # noqa: E402

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing"
)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels requested ahead and launched by calls on meta, as on an H100 under autocast."""
    asked, launched = {}, {}

    def run(self, stream, *tensors):
        launched.setdefault(self.job([t.dtype for t in tensors]).key)

    def expect(job):
        asked.setdefault(job.key)
        return True

    def start(self, *arguments, made=plans.Plan.__init__):
        made(self, *arguments)
        self.gpu = 0

    def convolve(self, *tensors, plain=nn.Conv2d._conv_forward):
        y = plain(self, *(t if t is None else t.to(torch.bfloat16) for t in tensors))
        return y.contiguous(memory_format=torch.channels_last)  # on meta, it is not

    def forget():
        gc.collect()
        call._stored.clear()
        guess._layers.clear()

    monkeypatch.setattr(launch.Launch, "__call__", run)
    monkeypatch.setattr(ahead, "expect", expect)
    monkeypatch.setattr(plans.Plan, "__init__", start)
    monkeypatch.setattr(plans, "current_device_index", lambda: 0)
    monkeypatch.setattr(plans, "current_raw_stream", lambda index: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(native, "path", native.PYTHON)
    monkeypatch.setattr(native, "_started", True)
    monkeypatch.setattr(can_run, "refusal_of_device", lambda *tensors: None)
    for norms in (group_norm, row_norms):
        monkeypatch.setattr(norms, "autocast_dtype", lambda x: torch.bfloat16)
    monkeypatch.setattr(batch_norm_plan, "machine_of", lambda x, alone=True: (132, True))
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", convolve)
    forget()
    yield asked, launched
    forget()


def step(model, x, fuse=True, training=True):
    """Run a training step of a model, or its forward in evaluation."""
    normplug.swap(model.to("meta"), backend="triton", autocast_output="low")
    for module in model.modules():
        if not isinstance(module, (normplug.modules.TargetVarianceNorm, nn.Conv2d)):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)
    if fuse:
        normplug.fuse(model)
    with torch.set_grad_enabled(training):
        y = model.train(training)(x.requires_grad_(training))
    if training:
        y.sum().backward()


FEATURES = torch.empty(16, 64, 64, 64, dtype=torch.bfloat16, device="meta")


def images(batch):
    x = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    return x.to(memory_format=torch.channels_last)


# Batch size; how many kernels a step launches and how many more it requests, swapped and fused.
MODELS = {
    "mobilenet_v3_large": (256, (10, 2), (21, 5)),
    "resnet50": (256, (6, 0), (18, 2)),
    "convnext_tiny": (128, (8, 3), (16, 6)),
}


@pytest.mark.parametrize("fuse", [False, True], ids=["swap", "fuse"])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_call_requests_all_later_kernels_of_the_step(kernels, name, fuse):
    batch, *counts = MODELS[name]
    model = torchvision.models.get_model(name)
    step(model, images(batch), fuse)
    if fuse:
        skip_if_not_followed(model)
    asked, launched = map(list, kernels)
    assert set(launched[1:]) <= set(asked)
    assert (len(launched), len(set(asked) - set(launched))) == counts[fuse]
    if name == "resnet50":
        # After the first layer's kernels, forwards come before backwards.
        forwards = ["_forward(" in key for key in asked[3:] if key in launched]
        assert forwards == sorted(forwards, reverse=True)


def pyramid(norm):
    """Convolutions that halve the image and double the channels, with norms and SiLU."""
    widths = (3, 64, 128, 256)
    stages = [
        (nn.Conv2d(a, b, 3, 2, 1), norm(b))
        for a, b in zip(widths, widths[1:], strict=False)
    ]
    return nn.Sequential(*(layer for stage in stages for layer in (*stage, nn.SiLU())))


class Block(nn.Module):
    """Two branches of a transformer. The rows of the first may lie in an attention's order."""

    def __init__(self, norm, permuted):
        super().__init__()
        self.norm1, self.norm2 = norm(256), norm(256)
        self.linear1, self.linear2 = nn.Linear(256, 256), nn.Linear(256, 256)
        self.permuted = permuted

    def forward(self, x):
        y = self.norm1(x)
        y = (
            self.linear1(y.transpose(0, 1)).transpose(0, 1)
            if self.permuted
            else self.linear1(y)
        )
        x = x + y
        y = self.norm2(x)
        return x + self.linear2(y)


def blocks(*options):
    return nn.Sequential(Block(*options), Block(*options))


# A model; how many kernels a fused step launches that were requested, and that were not, as they
# read rows in another order; and how many more it requests.
FAMILIES = {
    "GroupNorm": (lambda: pyramid(lambda c: nn.GroupNorm(32, c)), 6, 0, 1),
    "InstanceNorm": (lambda: pyramid(nn.InstanceNorm2d), 4, 0, 1),
    "LayerNorm": (lambda: blocks(nn.LayerNorm, True), 5, 1, 6),
    "RMSNorm": (lambda: blocks(nn.RMSNorm, False), 4, 0, 5),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_predicts_its_kernels(kernels, name):
    make, *counts = FAMILIES[name]
    is_image = name in ("GroupNorm", "InstanceNorm")
    step(make(), images(16) if is_image else torch.empty(64, 128, 256, device="meta"))
    asked, launched = map(set, kernels)
    assert [len(launched & asked), len(launched - asked), len(asked - launched)] == counts


class ChannelsLast(nn.Module):
    """Passes an image on in channels_last, as the attention of a diffusion model does."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)


def test_the_first_call_in_another_layout_requests_the_kernels_of_that_layout(kernels):
    norms = nn.GroupNorm(8, 64), nn.GroupNorm(8, 64)
    small = nn.AvgPool2d(4), nn.GroupNorm(16, 64)
    model = nn.Sequential(norms[0], ChannelsLast(), norms[1], *small)
    step(model, FEATURES, fuse=False)
    asked, launched = kernels
    forwards = [key for key in launched if "columns_forward" in key]
    assert len(forwards) == 2
    assert forwards[1] in asked


def test_an_evaluation_that_comes_first_requests_its_forwards_only(kernels):
    step(torchvision.models.resnet50(), images(256), training=False)
    asked, launched = kernels
    assert set(list(launched)[1:]) <= set(asked)
    assert not [key for key in asked if "_backward" in key]


def test_a_layer_that_cannot_be_guessed_changes_nothing(kernels):
    volume = normplug.swap(nn.BatchNorm3d(64))  # it refuses images
    model, random = pyramid(nn.BatchNorm2d), torch.get_rng_state()
    step(model, images(16))
    asked, launched = kernels
    assert set(list(launched)[1:]) <= set(asked)
    assert torch.equal(torch.get_rng_state(), random)
    assert volume.num_batches_tracked == 0


def test_a_model_that_is_gone_is_not_guessed(kernels):
    model = normplug.swap(nn.Sequential(nn.BatchNorm1d(64)))
    assert list(guess._layers) == [model[0]]
    del model
    gc.collect()
    assert not guess._layers
