"""The norm of a residual block's shortcut runs in the call of the block's last norm."""

import copy

import pytest
import torch
from torch import nn

import normplug
from fuse_cases import Parts, X, assert_same_step, outcome, swapped, twins, written
from normplug import fuse, fusions, swap, unfuse

FUSED = ["add, ReLU", "norm that adds it"]


class Shortcut(Parts):
    """Each method is the forward of a residual block whose shortcut has a norm."""

    def in_place(self, x):
        y = self.norm(self.conv(x))
        y += self.down(x)
        return self.act(y)

    def shortcut_first(self, x):
        skip = self.down(x)
        return self.act(skip + self.norm(self.conv(x)))

    def shortcut_changed_in_place(self, x):
        skip = self.down(x)
        skip += self.norm(self.conv(x))
        return self.act(skip)

    def only_added(self, x):
        return self.norm(self.conv(x)) + self.down(x)

    def read_twice(self, x):
        skip = self.down(x)
        return self.act(self.norm(self.conv(x)) + skip) + skip

    def input_changed(self, x):
        x = x * 1
        skip = self.down(x)
        x += 1
        return self.act(self.norm(self.conv(x)) + skip)


def block(name="in_place", norm=nn.BatchNorm2d, act=nn.ReLU):
    return written(
        Shortcut,
        name,
        conv=nn.Conv2d(8, 8, 3, padding=1, bias=False),
        norm=norm(8, momentum=None),
        down=nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), norm(8, eps=0.1)),
        act=act(),
    )


# Forward -> the labels of its norms, and what is computed in one call.
FORWARDS = {
    "in_place": (FUSED, ["add norm, relu"]),
    "shortcut_first": (FUSED[::-1], ["add norm, relu"]),
    "shortcut_changed_in_place": (FUSED[::-1], ["add norm, relu"]),
    "only_added": (["add", "norm that adds it"], ["add norm, None"]),
    "read_twice": (["add, ReLU", None], ["add, relu"]),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_both_norms_are_one_call_where_that_is_safe(name, calls):
    labels, expected = FORWARDS[name]
    model, plain = twins(block(name))
    assert [row.label for row in fusions(model)] == labels
    # The norms need not have the same mode.
    for each in (model, plain):
        each.down[1].mode = 2.0
    for mode in (True, False):
        calls.clear()
        assert_same_step(model, plain, X, training=mode)
        # Evaluation has no statistics to compute.
        without = [call.replace("add norm", "add") for call in expected]
        assert calls == (expected if mode else without)
    assert_same_step(unfuse(model), plain, X)


def test_a_norm_whose_input_changes_before_the_addition_runs_at_its_own_place(calls):
    model = block("input_changed")
    model.down = nn.BatchNorm2d(8)
    model, plain = twins(model)
    notes = [row.note for row in fusions(model) if not row.label]
    assert notes == [
        "nothing to do: an operation before the addition may change the input of the norm"
    ]
    with torch.no_grad():  # the backward would refuse the change
        torch.testing.assert_close(model(X), plain(X))
    assert calls == ["add, relu"]


def test_a_synchronised_norm_joins_one_that_is_synchronised_too(calls):
    model = block()
    plain = swap(swapped(model), sync=True)
    model = fuse(copy.deepcopy(plain))
    labels = [row.label for row in fusions(model)]
    assert "norm that adds it" in labels
    assert_same_step(model, plain, X)
    assert calls == ["add norm, relu"]


def hook(model):
    model.down[1].register_forward_hook(lambda module, args, y: y * 2)


def evaluate(model):
    """The shortcut's norm stays in evaluation."""
    normplug.freeze(model.down[1])


@pytest.mark.parametrize("change", [hook, evaluate])
def test_a_norm_with_a_hook_or_frozen_statistics_runs_apart(change, calls):
    model, plain = twins(block())
    for each in (model, plain):
        change(each)
    assert_same_step(model, plain, X)
    assert calls == ["add, relu"]


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("path", ["norm", "down.1"])
def test_frozen_parameters_get_no_gradient(path, name, calls):
    model, plain = twins(block())
    for each in (model, plain):
        getattr(each.get_submodule(path), name).requires_grad_(False)
    assert_same_step(model, plain, X)
    assert calls == ["add norm, relu"]


def test_norms_without_parameters_or_running_statistics_are_one_call(calls):
    def bare(width, **_):
        return nn.BatchNorm2d(width, affine=False, track_running_stats=False)

    model, plain = twins(block(norm=bare))
    assert_same_step(model, plain, X)
    assert calls == ["add norm, relu"]


def test_gradients_can_be_differentiated_again(calls):
    def second(model):
        x = X.detach().requires_grad_()
        model.train()
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *model.parameters()])

    model, plain = twins(block())
    for ours, theirs in zip(second(model), second(plain), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert calls == ["add norm, relu"]


def test_a_compiler_gets_the_norms_apart(calls):
    model, plain = twins(block())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, plain, X)
    assert calls == ["add, relu"]


def test_under_autocast_and_in_half_precision_a_step_is_as_exact_as_apart(calls):
    # Rounding decides on which side of a relu's bend a value is.
    model, plain = twins(block(act=nn.SiLU))
    exact = outcome(plain, X)
    model.float(), plain.float()
    ours, theirs = (
        outcome(each, X.float(), low=torch.bfloat16) for each in (model, plain)
    )
    assert calls == ["add norm, silu"]
    for name, value in exact.items():
        error, allowed = ((value - each[name].double()).norm() for each in (ours, theirs))
        assert error <= 2 * allowed + 1e-6 * value.double().norm(), name
