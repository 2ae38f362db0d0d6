"""Adaptive LayerNorm: a norm, and the scale and the shift after it, are one call."""

import copy

import pytest
import torch
from torch import nn

import normplug
from fuse_cases import Parts, assert_same_step, outcome, swapped, twins, written
from normplug import fuse, fusions, unfuse
from normplug.modules.probe import Probe
from swap_cases import one_graph

LABEL = "scale and shift after it"
X = torch.randn(2, 5, 8, dtype=torch.double)
C = torch.randn(2, 8, dtype=torch.double)


def modulate(x, shift, scale):
    """As in DiT's code."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def doubled(x, shift, scale):
    return 2 * (x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))


class Block(Parts):
    """Each method is a forward with one norm that a scale and a shift follow."""

    def called(self, x, c, **options):
        shift, scale = self.line(c).chunk(2, dim=1)
        return self.mix(modulate(self.norm(x), shift, scale))

    def one_line(self, x, c, mask=None, **options):
        shift, scale = self.line(c).chunk(2, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]

    def view_of_the_scale(self, x, c, **options):
        scale, shift = torch.chunk(self.line(c), 2, dim=1)
        return self.norm(x) * (scale + 1.0)[:, None, :] + shift[:, None, :]

    def two_lines(self, x, c, **options):
        scale, shift = self.line(c).chunk(2, dim=1)
        hidden = self.norm(x)
        hidden = hidden * (1 + scale[:, None]) + shift[:, None]
        return self.mix(hidden)

    def in_a_call(self, x, c, **options):
        shift, scale = self.line(c).chunk(2, dim=1)
        hidden = self.norm(x)
        return self.mix(modulate(hidden, shift, scale))

    def traced(self, x, c):
        scale, shift = self.line(c).unsqueeze(1).chunk(2, dim=-1)
        return self.mix(self.norm(x) * (1 + scale) + shift)

    def before_a_sum(self, x, c, **options):
        scale, shift = self.line(c).chunk(2, dim=1)
        x = x + self.mix(x)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]

    def in_a_branch(self, x, c, **options):
        scale, shift = self.line(c).chunk(2, dim=1)
        if c is not None:
            x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x


def block(name, norm=None):
    parts = {"norm": norm or nn.LayerNorm(8, elementwise_affine=False)}
    return written(Block, name, line=nn.Linear(8, 16), mix=nn.Linear(8, 8), **parts)


FORMS = [
    "called", "one_line", "view_of_the_scale", "two_lines", "in_a_call", "traced", "before_a_sum",
    "in_a_branch",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_one_call(name, calls):
    model, plain = twins(block(name))
    (row,) = fusions(model)
    assert row.label == LABEL + (" (in a branch)" if name == "in_a_branch" else "")
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, X, C, training=training)
        assert calls == ["scale and shift"]
    unfuse(model)
    calls.clear()
    model(X, C)
    assert calls == []


NORMS = [
    nn.LayerNorm(8),
    nn.LayerNorm(8, bias=False),
    nn.RMSNorm(8),
    nn.RMSNorm(8, elementwise_affine=False),
]


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("name", ["one_line", "traced"])
def test_weight_and_bias_of_the_norm_count(name, norm, calls):
    model, plain = twins(block(name, copy.deepcopy(norm)))
    assert_same_step(model, plain, X, C)
    assert calls == ["scale and shift"]


class PerToken(Block):
    def tokens(self, x, c, **options):
        return self.norm(x) * (1 + c) + x

    def other_shapes(self, x, c, **options):
        return self.norm(x) * (1 + c[:, None]) + x


@pytest.mark.parametrize(
    ("name", "c", "made"),
    [("tokens", X, ["scale and shift"]), ("other_shapes", C, []), ("tokens", C[0], [])],
)
def test_only_a_scale_and_a_shift_of_each_sample_or_token_run_in_the_call(
    name, c, made, calls
):
    model, plain = twins(written(PerToken, name, norm=nn.LayerNorm(8)))
    assert fusions(model).rows[0].label == LABEL
    assert_same_step(model, plain, X, c)
    assert calls == made


def test_other_dtypes_of_scale_and_shift_run_as_they_are_written(calls):
    model, plain = twins(written(PerToken, "tokens", norm=nn.LayerNorm(8)))
    y = model(X.float(), X)
    assert calls == []
    assert y.dtype == torch.double
    torch.testing.assert_close(y, plain(X.float(), X))


class Others(Block):
    """Forwards that are left as they are."""

    def other_function(self, x, c, **options):
        return doubled(self.norm(x), c, c)

    def read_twice(self, x, c, **options):
        y = self.norm(x)
        z = y * (1 + c[:, None]) + c[:, None]
        return z + y

    def without_one(self, x, c, **options):
        return self.norm(x) * c[:, None] + c[:, None]

    def computed_scale(self, x, c, **options):
        return self.norm(x) * (1 + self.line(c)[:, None]) + c[:, None]

    def statement_between(self, x, c, **options):
        y = self.norm(x)
        x.add_(1)
        return y * (1 + c[:, None]) + c[:, None]

    def traced_change_between(self, x, c):
        y = self.norm(x)
        x.add_(1)
        return y * (1 + c.unsqueeze(1)) + c.unsqueeze(1)


@pytest.mark.filterwarnings("ignore:normplug.fuse. nothing to fuse")
@pytest.mark.parametrize("name", [n for n in vars(Others) if not n.startswith("__")])
def test_what_may_compute_something_else_is_left(name, calls):
    plain = swapped(written(Others, name, norm=nn.LayerNorm(8), line=nn.Linear(8, 8)))
    model = fuse(copy.deepcopy(plain))
    (row,) = fusions(model)
    assert row.label is None
    assert row.note
    torch.testing.assert_close(model(X.clone(), C), plain(X.clone(), C))
    assert calls == []


@pytest.mark.parametrize("change", ["hook", "probe", "function"])
def test_a_hook_a_measurement_and_another_function_are_respected(
    change, calls, monkeypatch
):
    model, plain = twins(block("called"))
    for each in (model, plain):
        if change == "hook":
            each.norm.register_forward_hook(lambda module, args, y: y * 2)
        elif change == "probe":
            each.norm._probe = Probe()
    if change == "function":
        monkeypatch.setitem(globals(), "modulate", doubled)
    torch.testing.assert_close(model(X, C), plain(X, C))
    assert "scale and shift" not in calls


def test_a_compiler_fuses_it_without_help(calls):
    model, plain = twins(block("one_line"))
    expected = plain(X, C)
    calls.clear()
    torch.testing.assert_close(one_graph(model)(X, C), expected)
    assert "scale and shift" not in calls


@pytest.mark.parametrize("mode", ["standard", 0.5])
def test_under_autocast_the_result_has_the_same_dtype(mode, calls):
    model, plain = twins(block("one_line"), mode)
    model.float()
    plain.float()
    ours = outcome(model, X.float(), C.float(), low=torch.bfloat16)["y"]
    theirs = outcome(plain, X.float(), C.float(), low=torch.bfloat16)["y"]
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    assert calls == ["scale and shift"]


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_the_adaptive_norms_of_diffusers_are_fused(calls):
    normalization = pytest.importorskip("diffusers.models.normalization")
    layers = [
        (normalization.AdaLayerNormZero(8, None), {"emb": C}),
        (normalization.AdaLayerNormZeroSingle(8), {"emb": C}),
        (normalization.AdaLayerNormContinuous(8, 8), {"conditioning_embedding": C}),
    ]
    for layer, arguments in layers:
        model, plain = twins(layer)
        assert fusions(model).rows[0].label == LABEL
        calls.clear()
        torch.testing.assert_close(model(X, **arguments), plain(X, **arguments))
        assert calls == ["scale and shift"]
    assert normplug.check(model)
