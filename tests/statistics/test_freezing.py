"""`freeze`, `thaw`, and frozen batch norms of other libraries.

A number is that of PyTorch's issue, whose fault the stock model shows.
"""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import normplug
from calls import saved_bytes
from normplug import (
    check,
    doctor,
    freeze,
    fuse,
    fusions,
    plan,
    recalibrate,
    set_mode,
    swap,
    swapped,
    thaw,
    unfuse,
    unswap,
)
from normplug._tools.runs import untouched
from normplug.modules.frozen import is_frozen
from statistics_cases import (
    KINDS,
    equal,
    images,
    layer_and_input,
    net,
    statistics,
    trained,
)


def of_torch(layer):
    """Whether tools that look for torch's base classes see a layer."""
    kinds = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    return isinstance(layer, kinds)


@pytest.mark.filterwarnings("ignore:normplug. a fused model is pickled")
@pytest.mark.filterwarnings("ignore:normplug.unswap. Sequential has no normplug layers")
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("change", [lambda m: m, swap, lambda m: fuse(swap(m))])
def test_66073_a_frozen_norm_survives_train_swap_and_copies(kind, change):
    stock = net(kind)
    stock[1].eval()
    assert stock.train()[1].training
    model = freeze(stock)
    before = statistics(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(change(model).train())))
    for each in (model, twin, twin.train(), unswap(twin).train()):
        each(images(4)).sum().backward()
        assert each.training
        assert not each[1].training
        assert equal(before, statistics(each))


def test_thaw_gives_back_what_the_freeze_took():
    model = net()
    model[1].bias.requires_grad_(False)
    freeze(freeze(model.eval()), affine=False).train()
    assert [p.requires_grad for p in model[1].parameters()] == [False, False]
    thaw(swap(model))
    assert [p.requires_grad for p in model[1].parameters()] == [True, False]
    assert model[1].training
    before = statistics(model)
    model(images(4))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


@pytest.mark.parametrize("kind", KINDS)
def test_freeze_and_swap_lead_to_one_class_in_either_order_and_back(kind):
    stock, x = layer_and_input(kind)
    expected = copy.deepcopy(stock).eval()(x)
    attributes = dict(vars(stock))
    frozen = freeze(copy.deepcopy(stock))
    both = [swap(copy.deepcopy(frozen)), freeze(swap(copy.deepcopy(stock)))]
    assert type(both[0]) is type(both[1])
    for layer in (frozen, *both):
        assert not layer.train().training
        assert not of_torch(layer)
        assert list(layer.state_dict()) == list(stock.state_dict())
        torch.testing.assert_close(layer(x), expected)
        layer.training = True  # as a tool may assign it
        torch.testing.assert_close(layer(x), expected)
    assert type(unswap(both[0])) is type(frozen)
    for layer in (thaw(both[0]), unswap(thaw(both[1])), thaw(frozen)):
        assert type(layer) is type(stock)
        assert set(vars(layer)) == set(attributes)
        assert layer.training
        assert all(p.requires_grad for p in layer.parameters())


STEPS = {
    "swap": (swap, unswap),
    "swap(sync=True)": (partial(swap, sync=True), unswap),
    "set_mode": (lambda m: set_mode(swap(m), 0.5), partial(unswap, fold=False)),
    "fuse": (lambda m: fuse(swap(m)), lambda m: unswap(unfuse(m))),
    "copy.deepcopy": (copy.deepcopy, lambda m: m),
}


@pytest.mark.parametrize("step", STEPS)
def test_freeze_commutes_with_every_other_step(step):
    do, undo = STEPS[step]
    before, after = do(freeze(net())), freeze(do(net()))
    assert type(before[1]) is type(after[1])
    torch.testing.assert_close(before.train()(images(4)), after.train()(images(4)))
    for model in (undo(before), undo(thaw(after))):
        assert [type(m) for m in thaw(model)] == [type(m) for m in net()]
        assert model[1].training


def test_a_fused_frozen_norm_is_one_call_with_its_activation():
    model = fuse(freeze(swap(net()))).train()
    assert [row.label for row in fusions(model)] == ["ReLU", None]
    torch.testing.assert_close(model(images(4)), net().eval()(images(4)))


def test_swapped_keeps_a_freeze_and_a_thaw_in_its_block():
    model = freeze(net())
    with swapped(model, 0.5):
        assert not model.train()[1].training
    assert is_frozen(model[1])
    with swapped(model, 0.5):
        thaw(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].training


def test_copies_of_a_frozen_layer_are_frozen_layers_of_their_own():
    layer = freeze(nn.BatchNorm2d(4))
    layer.bound = layer.extra_repr
    deep, shallow = copy.deepcopy(layer), copy.copy(layer)
    assert deep.bound.__self__ is deep
    thaw(layer)
    for twin in (deep, shallow):
        assert is_frozen(twin)
        assert not twin.train().training
    assert shallow.running_mean is layer.running_mean
    assert deep.running_mean is not layer.running_mean


def test_freezing_again_adds_layers_and_keeps_what_thaw_gives_back():
    model = freeze(freeze(freeze(net(), include="1"), include=nn.BatchNorm2d))
    assert all(is_frozen(model[i]) for i in (1, 4))
    swap(model, include=nn.BatchNorm2d)
    assert freeze(model, include=normplug.BatchNorm2d) is model
    thaw(unswap(model))
    assert all(p.requires_grad for p in model.parameters())
    assert [type(m) for m in model] == [type(m) for m in net()]


def test_a_shared_layer_matches_by_each_of_its_names():
    norm = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"first": norm, "second": norm})
    assert is_frozen(freeze(model, include="second")["first"])
    thaw(model)
    other = nn.ModuleDict({"norms": model, "third": nn.BatchNorm2d(3)})
    freeze(other, exclude="norms.second")
    assert [is_frozen(norm), is_frozen(other["third"])] == [False, True]


def test_freeze_removes_gradients_so_that_no_optimizer_moves_the_weights():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    model(images(4)).sum().backward()
    freeze(model)
    assert all(p.grad is None for i in (1, 4) for p in model[i].parameters())
    before = copy.deepcopy(model[1].state_dict())
    optimizer.step()
    assert equal(before, model[1].state_dict())


def test_the_weight_of_a_parametrized_norm_stops_training_and_trains_again():
    def parametrized(model):
        parametrize.register_parametrization(model[1], "weight", nn.Identity())
        return model

    for model in (freeze(parametrized(net())), parametrized(freeze(net()))):
        model.train()
        swap(model)
        assert not any(p.requires_grad for p in model[1].parameters())
        torch.testing.assert_close(model(images(4)), net().eval()(images(4)))
        assert is_frozen(copy.deepcopy(model)[1])
        thaw(unswap(model))
        assert all(p.requires_grad for p in model[1].parameters())
        assert model[1].training
        assert type(model[1]).__bases__ == (nn.BatchNorm2d,)
        parametrize.remove_parametrizations(model[1], "weight")


def test_a_lazy_layer_is_refused_and_nothing_changes():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    with pytest.raises(
        ValueError, match="lazy layers have no statistics yet: 1. Run one"
    ):
        freeze(model)
    assert not is_frozen(model[0])
    assert is_frozen(freeze(model, exclude="1")[0])


def disabled_train(mode=True):
    return None


def test_train_attributes_of_other_code_stay():
    model = net()
    model.train = model[1].train = disabled_train
    thaw(freeze(thaw(model)))
    assert model.train is disabled_train
    assert model[1].train is disabled_train
    loaded = pickle.loads(pickle.dumps(freeze(model)))
    assert loaded[1].train is disabled_train
    loaded[4].train = disabled_train
    thaw(loaded)
    assert loaded[1].train is disabled_train
    assert loaded[4].train is disabled_train


def test_a_forward_that_other_code_put_on_the_instance_stays_and_sees_evaluation():
    model = net()
    expected, forward = 2 * net().eval()[:2](images(4)), model[1].forward
    model[1].forward = lambda x: 2 * forward(x)
    freeze(model).train()
    assert torch.equal(model[:2](images(4)), expected)


def test_reports_say_that_a_layer_is_frozen():
    model = freeze(net(), include="1")
    assert "frozen" in repr(model[1])
    assert [row.note for row in plan(model)] == ["frozen", ""]
    assert [row.kind for row in plan(model)] == 2 * ["BatchNorm2d"]
    swap(model)
    assert "frozen, mode=standard" in repr(model[1])
    already = "swapped already, mode standard"
    assert [row.note for row in plan(model)] == [f"{already}; frozen", already]
    assert [row.becomes for row in plan(model)] == 2 * ["BatchNorm2d"]


def test_check_compares_a_frozen_layer_with_the_running_statistics_in_every_setting():
    model = freeze(swap(net(), 0.5))
    assert [row.tested for row in check(model, images(4))] == 2 * [
        "train, eval, eval under no_grad"
    ]
    model[1].running_mean += 1.0  # an input of the formula as well
    check(model)


def test_check_finds_a_class_that_was_patched_after_its_layers_were_frozen(monkeypatch):
    model = freeze(swap(net()))
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, x: x)
    with pytest.raises(RuntimeError, match="forward of its stock class was replaced"):
        check(model)


@pytest.mark.parametrize("change", [lambda m: m, swap], ids=["stock", "swapped"])
@pytest.mark.parametrize("kind", ["InstanceNorm1d", "InstanceNorm2d"])
def test_without_tracking_a_frozen_instance_norm_normalises_by_its_input(kind, change):
    layer, x = layer_and_input(kind)
    layer.track_running_stats = False
    expected = copy.deepcopy(layer).eval()(x)
    before = statistics(layer)
    frozen = freeze(change(layer))
    assert torch.equal(frozen(x), expected)
    frozen(torch.full_like(x, torch.nan))
    assert equal(before, statistics(layer))
    thaw(frozen)(x)
    assert not equal(before, statistics(layer))


@pytest.mark.parametrize("change", [lambda m: m, swap, lambda m: unswap(swap(m))])
def test_a_norm_that_is_parametrized_while_it_is_frozen_can_be_copied_after_thaw(change):
    model = freeze(net())
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    model = thaw(change(model))
    made = copy.deepcopy(copy.deepcopy(model))
    assert type(made[1]) is type(model[1])
    assert torch.equal(made(images(4)), model(images(4)))


def test_tools_that_run_a_model_leave_the_mode_that_thaw_gives_back():
    for mode in (True, False):
        model = freeze(trained(), include="1").train(mode)
        doctor(model, images(16))
        recalibrate(model, [images(16)])
        assert thaw(model)[1].training is mode
    layer = freeze(nn.BatchNorm2d(3))
    with untouched(layer):
        layer.eval()
    assert thaw(layer).training


def test_a_layer_trains_after_thaw_where_other_code_has_restored_the_modes_that_it_read():
    """As Lightning does around a validation."""
    model = freeze(net())
    modes = {m: m.training for m in model.modules()}
    model.eval()
    for m, mode in modes.items():
        m.training = mode
    assert thaw(model)[1].training
    assert not thaw(freeze(model).eval())[1].training


def test_reset_running_stats_keeps_frozen_statistics_and_reset_parameters_does_not():
    for layer in (freeze(nn.BatchNorm2d(4)), freeze(swap(nn.BatchNorm2d(4)))):
        layer.running_mean += 1.0
        layer.reset_running_stats()
        assert layer.running_mean.all()
        layer.reset_parameters()
        assert not layer.running_mean.any()


def test_filters_and_affine():
    model = freeze(net(), exclude="4", affine=False)
    assert [model[1].training, model[4].training] == [False, True]
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="include='7' matches no norm layer"):
        freeze(net(), include="7")
    with pytest.raises(
        ValueError, match="no BatchNorm or InstanceNorm with running statistics"
    ):
        freeze(nn.LayerNorm(3))


class FrozenBatchNorm2d(nn.Module):
    """As in DETR: eps is a constant of the forward."""

    def __init__(self, n):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(n) + 0.5)

    def forward(self, x):
        weight, bias, mean, var = (b.reshape(1, -1, 1, 1) for b in self.buffers())
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + bias - mean * scale


def frozen_classes():
    yield FrozenBatchNorm2d
    yield pytest.importorskip("torchvision.ops").FrozenBatchNorm2d


@pytest.mark.parametrize("cls", list(frozen_classes()))
def test_a_frozen_class_is_swapped_fused_and_given_back(cls):
    model = net(lambda n, **_: cls(n))
    for buffer in model.buffers():
        buffer.uniform_(0.5, 2.0)
    x = images(2).requires_grad_()
    expected, keys, own = model(x), list(model.state_dict()), set(vars(model[1]))
    (dx,) = torch.autograd.grad(expected.sum(), x, retain_graph=True)
    fuse(swap(model))
    assert all(
        isinstance(model[i], cls) and not list(model[i].parameters()) for i in (1, 4)
    )
    assert list(model.state_dict()) == keys
    tested = [row.tested for row in check(model, x.detach())]
    assert tested == 2 * ["train, eval, eval under no_grad"]
    for each in (model, pickle.loads(pickle.dumps(unswap(copy.deepcopy(model)))).train()):
        y = each(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], dx)
    swap(model, "golden", preserve_output=True)
    torch.testing.assert_close(model(x), expected)
    unswap(model)
    assert [type(model[i]) for i in (1, 4)] == [cls, cls]
    assert set(vars(model[1])) == own
    torch.testing.assert_close(model(x), expected)


def test_a_frozen_class_with_another_function_stays():
    class FrozenBatchNormTwice(FrozenBatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    (row,) = plan(nn.Sequential(FrozenBatchNormTwice(3)))
    assert row.becomes is None
    assert "it uses stored statistics, so there is no variance to set" in row.note


def test_133566_a_frozen_norm_saves_an_input_that_it_does_not_need():
    """On the CPU; `test_constant_kernels.py` shows that the kernels save no input."""
    pytest.importorskip("triton")
    stock, x = nn.BatchNorm2d(3).eval(), images(4).requires_grad_()
    stock.requires_grad_(False)
    assert saved_bytes(lambda: stock(x)) > x.numel() * 4
