"""Which convolutions next to norms `fuse` takes, and what `fusions` says of the others."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fuse_cases import (
    Parts,
    X,
    assert_same_step,
    swapped,
    torchvision_model,
    twins,
    written,
)
from normplug import fuse, fusions, unfuse
from normplug._fuse import beside, calls
from normplug._ops import convolutions, recompute


@pytest.fixture
def ran(monkeypatch):
    """The functions that fused forwards call for convolutions, in order."""
    names = []
    for name in ("convolve", "fork"):

        def watched(*arguments, name=name):
            names.append(name)
            return getattr(calls, name)(*arguments)

        monkeypatch.setattr(beside, name, watched)
    return names


def notes(model):
    """The notes about gradients, by the norm's path."""
    return {
        row.path: row.note.partition(": ")[2]
        for row in fusions(model)
        if row.note.startswith("gradient of ")
    }


FORK = "added to the shortcut's"
FLIP = "a convolution with the flipped weight"


class Shortcuts(Parts):
    """Each method is a forward that begins with a convolution, beside a shortcut."""

    def identity(self, x):
        return self.act(self.second(self.other(self.act(self.norm(self.conv(x))))) + x)

    def in_place(self, x):
        y = self.second(self.other(self.act(self.norm(self.conv(x)))))
        y += x
        return self.act(y)

    def shape_is_read(self, x):
        y = self.second(self.other(self.act(self.norm(self.conv(x)))))
        return (self.act(y + x)).reshape(x.shape)

    def shortcut_first(self, x):
        identity = self.other(x)
        return self.act(self.norm(self.conv(x))) + identity

    def input_changes(self, x):
        x = x * 1
        y = self.second(self.act(self.norm(self.conv(x))))
        x += y
        return self.act(x)

    def view_changes_after_shortcut(self, x):
        y = x * 1
        x = y.view(y.shape)
        identity = self.other(x)
        y += 1
        return self.act(self.norm(self.conv(x))) + identity

    def shortcut_changes_view(self, x):
        y = x * 1
        x = y.view(y.shape)
        y += x
        return self.act(self.norm(self.conv(x))) + y

    def input_is_activated_in_place(self, x):
        x = x * 1
        y = self.act(self.norm(self.conv(x)))
        return y + self.in_place_act(x)

    def three_readers(self, x):
        y = self.act(self.norm(self.conv(x)))
        return self.act(self.second(y) + x) + x

    def no_shortcut(self, x):
        return self.act(self.norm(self.conv(x)))

    def read_twice(self, x):
        y = self.conv(x)
        return self.act(self.norm(y)) + y + x

    def no_norm(self, x):
        return self.act(self.norm(self.act(self.conv(x)))) + x


def parts(conv=None):
    return {
        "conv": conv or nn.Conv2d(8, 8, 1, bias=False),
        "other": nn.Conv2d(8, 8, 1, bias=False),
        "norm": nn.BatchNorm2d(8),
        "second": nn.BatchNorm2d(8),
        "act": nn.ReLU(),
        "in_place_act": nn.ReLU(inplace=True),
    }


TAKEN = ("identity", "in_place", "shape_is_read", "shortcut_first")
LEFT = [
    name for name in vars(Shortcuts) if not name.startswith("__") and name not in TAKEN
]


@pytest.mark.parametrize("name", TAKEN)
def test_the_first_convolution_of_a_residual_block_is_taken(name, ran):
    model, plain = twins(written(Shortcuts, name, **parts()))
    assert notes(model) == {"norm": FORK}
    assert_same_step(model, plain, X)
    assert ran == ["fork"]
    ran.clear()
    assert_same_step(unfuse(model), plain, X)
    assert ran == []


def test_a_hook_of_the_shortcut_changes_the_input_of_a_convolution_after_it(ran):
    model, plain = twins(written(Shortcuts, "shortcut_first", **parts()))
    for each in (model, plain):
        each.other.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    with torch.no_grad():
        assert torch.equal(model(X.clone()), plain(X.clone()))
    assert ran == []


@pytest.mark.parametrize("name", LEFT)
def test_a_convolution_without_a_plain_shortcut_is_left(name, ran):
    model, plain = twins(written(Shortcuts, name, **parts()))
    assert notes(model) == {}
    with torch.no_grad():  # autograd refuses those that change the input
        assert torch.equal(model(X), plain(X))
    assert ran == []


class Rows(Parts):
    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2) + x


def test_a_convolution_whose_bias_a_layer_norm_adds_is_taken_if_it_is_depthwise(ran):
    for conv, found in (
        (nn.Conv2d(8, 8, 1), {}),
        (depthwise(3, bias=True), {"norm": FLIP}),
    ):
        model, plain = twins(Rows(conv=conv, norm=nn.LayerNorm(8)))
        assert notes(model) == found
        assert [row.label for row in fusions(model)] == ["bias of Conv2d"]
        assert_same_step(model, plain, X)
        assert ran == []


class Other(nn.Conv2d):
    pass


def hooked():
    layer = nn.Conv2d(8, 8, 1, bias=False)
    layer.register_forward_hook(lambda *_: None)
    return layer


def normalised():
    return parametrizations.weight_norm(nn.Conv2d(8, 8, 1, bias=False))


def depthwise(kernel, **options):
    settings = {"padding": kernel // 2, "groups": 8, "bias": False, **options}
    return nn.Conv2d(8, 8, kernel, **settings)


# How to make a convolution -> why PyTorch computes its gradients.
REFUSED = [
    (lambda: nn.Conv2d(8, 8, 1), "a bias"),
    (lambda: Other(8, 8, 1, bias=False), "a Other"),
    (hooked, "hooks"),
    (normalised, "a ParametrizedConv2d"),
    (lambda: nn.Conv2d(8, 8, 1, groups=2, bias=False), "kernel_size=(1, 1), groups=2"),
    (
        lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False),
        "kernel_size=(3, 3), groups=1",
    ),
    (lambda: depthwise(3, dilation=2, padding=2), "dilation=(2, 2)"),
    (lambda: depthwise(3, padding="same"), "padding='same'"),
    (lambda: depthwise(3, padding_mode="circular"), "padding_mode='circular'"),
    (lambda: depthwise(3, bias=True), "a bias"),
    (lambda: depthwise(9), "kernel_size=(9, 9), groups=8"),
    (lambda: depthwise(1), "kernel_size=(1, 1), groups=8"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_a_report_says_why_a_convolution_is_left(make, why, ran):
    model, plain = twins(written(Shortcuts, "identity", **parts(make())))
    assert notes(model) == {"norm": f"PyTorch's ({why})"}
    assert "gradient of conv: " in str(fusions(model))
    assert_same_step(model, plain, X)
    assert ran == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("resnet18", {"PyTorch's (kernel_size=(3, 3), groups=1)": 5}),
        ("resnet50", {FORK: 16}),
        ("resnext50_32x4d", {FORK: 16}),
        # With shortcuts that run first, and inner modules.
        ("regnet_y_400mf", {FORK: 16}),
        ("mobilenet_v3_small", {FORK: 6, FLIP: 7}),
        ("efficientnet_b0", {FORK: 9, FLIP: 12}),
        ("convnext_tiny", {FLIP: 18}),
        ("densenet121", {}),
    ],
)
def test_convolutions_of_known_models_are_taken(name, found):
    model = fuse(swapped(torchvision_model(name)))
    stated = [*notes(model).values()]
    for note, count in found.items():
        assert stated.count(note) == count
    assert (FORK in stated, FLIP in stated) == (FORK in found, FLIP in found)


@pytest.mark.skipif(not recompute.AVAILABLE, reason="needs torch 2.8")
def test_recomputed_inputs_are_not_saved_by_convolutions(ran):
    model = swapped(torchvision_model("mobilenet_v3_small"))
    plain = copy.deepcopy(model)
    fuse(model, recompute=True)
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    assert_same_step(model, plain, x)
    assert ran == []


def test_the_conditions_of_speed_are_those_that_were_measured():
    assert convolutions.DEVICES == ("cuda",)
    assert torch.float32 not in convolutions.ACCUMULATED
    assert 5 not in convolutions.FLIPPED[torch.float16, True]
