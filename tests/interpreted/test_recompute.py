"""Fused models that recompute norms' outputs give the same results as those that save them.

All but sums that are saved as normalised values give the same bits.
"""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import routes
from fuse_cases import Block, PreNorm, outcome
from normplug import fuse, swap, unfuse
from recompute_cases import (
    Attend,
    Feed,
    Residual,
    check_as_exact,
    check_same,
    convolutions,
    kept,
    twins,
)
from statistics_cases import Checkpointed

pytestmark = routes.NEEDS_RECOMPUTE

X = torch.randn(2, 4, 6, 5)
PLANES = torch.randn(2, 4, 11, 10)
ROWS = torch.randn(4, 3, 8) * 2 + 3
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


@pytest.fixture
def recomputed(monkeypatch):
    """The outputs that were recomputed."""
    return routes.watch_recomputed(monkeypatch)


def chain():
    return convolutions(nn.ReLU(inplace=True), nn.SiLU(), nn.GELU())


def blocks():
    return nn.Sequential(Block(4), Block(4, down=nn.Conv2d(4, 4, 1)))


def stem_and_blocks():
    """A norm without an addition, two residual blocks, and one with a norm in its shortcut."""
    stem = convolutions(nn.ReLU())[:-1]
    down = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    return nn.Sequential(*stem, Residual(), Residual(), Residual(down=down))


# A block that adds a recomputed output keeps its own. Else one recomputation would need a chain.
IN_TURNS = {"3.conv1", "5.conv1", "5.down.0", "3.conv2", "4.conv2", "5.conv2"}
SILU = {"0.conv2", "1.conv2"}


MODELS = {
    "chain": (chain, {"3", "6", "9"}),
    "blocks": (blocks, {"0.conv2", "1.conv2"}),
    "stem and blocks": (stem_and_blocks, IN_TURNS),
    # The norm's own backward reads the residual that is added before a SiLU.
    "silu": (lambda: nn.Sequential(Residual(nn.SiLU()), Residual(nn.SiLU())), SILU),
}


@pytest.mark.parametrize(
    ("name", "dtype", "memory_format"),
    [
        ("chain", FLOAT32, CHANNELS_LAST),
        ("blocks", FLOAT32, CONTIGUOUS),
        ("blocks", BFLOAT16, CHANNELS_LAST),
        ("stem and blocks", BFLOAT16, CONTIGUOUS),
        ("silu", FLOAT32, CHANNELS_LAST),
    ],
    ids=str,
)
def test_a_batch_norms_output_is_freed_and_no_bit_changes(name, dtype, memory_format):
    make, dropped = MODELS[name]
    ours, plain = twins(make().to(dtype=dtype, memory_format=memory_format))
    x = PLANES.to(dtype).contiguous(memory_format=memory_format)
    for _ in range(2):
        check_same(ours, plain, x)
    everything = {name for name, m in plain.named_modules() if isinstance(m, nn.Conv2d)}
    assert kept(plain, x) == everything
    assert kept(ours, x) == everything - dropped


def test_a_layer_norms_output_is_freed_and_no_bit_changes():
    ours, plain = twins(Feed())
    check_same(ours, plain, ROWS)
    assert kept(plain, ROWS) - kept(ours, ROWS) == {"mlp.0"}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_under_autocast_gradients_from_normalised_values_are_as_exact(norm, recomputed):
    model = nn.Sequential(PreNorm(32, norm=norm), PreNorm(32, norm=norm))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-2, 2)
    x = torch.randn(64, 32) + 100  # rows far from zero
    exact = outcome(copy.deepcopy(model).double(), x.double())
    ours, plain = twins(model)
    check_as_exact(ours, plain, exact, x, BFLOAT16)
    assert [y.dtype for y in recomputed] == [BFLOAT16] * 3


def test_a_wide_sum_is_not_saved_where_normalised_values_are():
    x, residual = torch.randn(2, 6, 8, requires_grad=True)
    for wants, is_kept in ((True, False), (False, True)):
        norm = swap(nn.Sequential(nn.LayerNorm(8)), backend="triton")[0]
        with torch.autocast("cpu", BFLOAT16):
            y, total = norm._fused_add(x, residual, wants)
        storage = StorageWeakRef(total.untyped_storage())
        del total
        gc.collect()  # Triton's interpreter leaves cycles behind
        assert storage.expired() is not is_kept
        assert torch.autograd.grad(y.sum(), x)[0].dtype == FLOAT32


def test_normalised_values_have_no_second_derivatives():
    ours, _ = twins(Feed())
    x = ROWS.clone().requires_grad_()
    with torch.autocast("cpu", BFLOAT16):
        y = ours(x)
    with pytest.raises(RuntimeError, match=r"second derivatives.*normplug.fuse\(model\)"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("make", "low"), [(Attend, None), (Feed, BFLOAT16)], ids=["attention", "autocast"]
)
def test_a_copy_of_the_output_is_saved_and_no_bit_changes(make, low, recomputed):
    ours, plain = twins(make(), autocast_output="float32")
    check_same(ours, plain, ROWS, low)
    assert not recomputed


def test_only_calls_with_gradients_recompute(recomputed):
    ours, plain = twins(chain())
    with torch.no_grad():
        assert torch.equal(ours(X), plain(X))
    assert not recomputed
    check_same(ours.eval(), plain.eval(), X)
    assert len(recomputed) == 3


class Doubled(nn.Module):
    """Modifies its input in place, then reads it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x.mul_(2))
        return y + x.mul_(2)


def test_modifying_the_output_in_place_fails_or_works_as_without_recomputation(
    recomputed,
):
    first = convolutions(nn.ReLU())
    ours, plain = twins(nn.Sequential(*first[:-1], Doubled()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(plain, X)
    with pytest.raises(
        RuntimeError, match="normplug: .*modified by an inplace operation"
    ):
        outcome(ours, X)
    assert not recomputed
    changes = nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Conv2d(4, 4, 1))
    ours, plain = twins(nn.Sequential(*first[:-1], changes))
    check_same(ours, plain, X)


class Views(nn.Module):
    """Reads parts, views and a cast of its input."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1).double()

    def forward(self, x):
        part, last = x.chunk(2, 1)
        parts = self.one(part) * self.one(last) + x.flatten(1).square().mean()
        return parts + self.other(x.double())


@pytest.mark.parametrize("memory_format", [CONTIGUOUS, CHANNELS_LAST], ids=str)
def test_views_of_the_output_are_recomputed(memory_format, recomputed):
    model = nn.Sequential(*convolutions(nn.GELU())[:-1], Views())
    ours, plain = twins(model.to(memory_format=memory_format))
    x = X.contiguous(memory_format=memory_format)
    check_same(ours, plain, x)
    assert len(recomputed) >= 2  # both parts


def test_a_weight_modified_before_the_backward_is_detected():
    for model in twins(chain()):
        y = model(X)
        with torch.no_grad():
            model[3].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize(
    "kind",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_run_on_the_module_that_reads_the_output(kind, recomputed):
    ours, plain = twins(chain())
    seen = []
    for model in (ours, plain):
        getattr(model[3], kind)(lambda m, x, *_: seen.append(x[0].detach().clone()))
    check_same(ours, plain, X)
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert len(recomputed) == 3


@pytest.mark.parametrize(
    ("make", "x"),
    [(chain, X), (stem_and_blocks, X), (Feed, ROWS)],
    ids=["batch", "blocks", "layer"],
)
def test_a_second_backward_gives_the_same_bits_and_derivatives_differ_by_rounding(
    make, x
):
    ours, plain = twins(make().double())
    gradients, second = [], []
    for model in (ours, plain):
        x = x.detach().double().requires_grad_()
        y = model(x).square().sum()
        leaves = [x, *model.parameters()]
        once = torch.autograd.grad(y, leaves, retain_graph=True)
        again = torch.autograd.grad(y, leaves, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in again), leaves)
        gradients.append([*once, *again])
        second.append(twice)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    # PyTorch's convolutions round their second derivatives by where the memory lies.
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_works_around_the_model_and_in_it(reentrant, recomputed):
    ours, plain = twins(chain())
    check_same(Checkpointed(ours, reentrant), Checkpointed(plain, reentrant), X)
    # A non-reentrant checkpoint saves tensors with hooks of its own.
    assert len(recomputed) == (3 if reentrant else 0)
    recomputed.clear()
    inside = Checkpointed(nn.Conv2d(4, 4, 1), reentrant)
    ours, plain = twins(nn.Sequential(*convolutions(nn.ReLU())[:-1], inside))
    check_same(ours, plain, X)
    assert len(recomputed) == 1


def test_other_saved_tensor_hooks_see_every_saved_tensor(recomputed):
    ours, plain = twins(chain())
    saved = {ours: [], plain: []}
    for model, seen in saved.items():
        with saved_tensors_hooks(
            lambda t, s=seen: s.append(t.detach()) or t, lambda t: t
        ):
            model(X).sum().backward()
    assert not recomputed
    torch.testing.assert_close(*saved.values(), rtol=0, atol=0)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        ours(X).sum().backward()
    assert not recomputed


def test_the_module_that_reads_the_output_may_have_fused_modules_inside(recomputed):
    inner = convolutions(nn.ReLU(), nn.GELU())
    ours, plain = twins(nn.Sequential(*convolutions(nn.SiLU())[:-1], inner))
    inner.register_forward_hook(lambda *_: None)  # so that it is called, and not followed
    check_same(ours, plain, X)
    assert len(recomputed) == 3
    assert kept(plain, X) - kept(ours, X) == {"3.0", "3.3", "3.6"}


def test_after_the_norms_backward_nothing_can_be_recomputed():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.one(x), self.other(x)

    ours, _ = twins(nn.Sequential(*convolutions(nn.ReLU())[:-1], Two()))
    one, other = ours(X.clone().requires_grad_())
    one.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(other.sum(), ours[3].other.weight)


def test_copies_keep_the_recompute_setting(recomputed):
    for model, count in zip(twins(nn.Sequential(chain(), Block(4))), (4, 0), strict=True):
        copied = copy.deepcopy(model)
        recomputed.clear()
        check_same(copied, model, X)
        assert len(recomputed) == 2 * count


def test_the_last_fuse_decides_and_unfuse_undoes(recomputed):
    ours, plain = twins(chain())
    for change, count in ((fuse, 0), (lambda m: fuse(m, recompute=True), 3), (unfuse, 0)):
        recomputed.clear()
        change(ours)
        if change is unfuse:
            unfuse(plain)
        check_same(ours, plain, X)
        assert len(recomputed) == count


def test_a_compiled_module_may_read_the_output(recomputed):
    ours, plain = twins(convolutions(nn.ReLU()))
    for model in (ours, plain):
        model[3].compile(backend="aot_eager")
    check_same(ours, plain, X)
    torch.compiler.reset()
