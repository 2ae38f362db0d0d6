"""What a swap keeps of a model, what it changes, and how it is undone."""

from collections import Counter

import pytest
import torch
from torch import nn

import normplug
from matrix import folded
from normplug import LayerNorm, plan, set_mode, swap, target_variance, unswap
from swap_cases import GOLDEN, Stubborn, X, assert_frozen, frozen, train_step


@pytest.mark.parametrize("mode", ["golden", 0.5, "standard"])
@pytest.mark.parametrize("training", [True, False])
def test_a_swapped_model_equals_the_stock_model_with_the_scale_folded_in(
    net, mode, training
):
    tv = target_variance(mode)
    expected = folded(net, tv).train(training)
    assert swap(net.train(training), mode) is net
    torch.testing.assert_close(net(X), expected(X))
    torch.testing.assert_close(net.stem[1].running_var, expected.stem[1].running_var)


def test_modules_parameters_buffers_hooks_and_flags_survive(net):
    calls = []
    of_calls = ["forward", "forward_pre", "full_backward", "full_backward_pre"]
    of_states = [
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    ]
    for layer, hooks in ((net.norm, of_calls), (net.flat, of_states)):
        for hook in hooks:
            getattr(layer, f"register_{hook}_hook")(
                lambda *_, hook=hook: calls.append(hook)
            )
    net.norm.weight.register_hook(lambda *_: calls.append("gradient"))
    net.flat.weight.requires_grad_(False)
    net.flat.eval()
    net.norm.note = "mine"
    modules = {path: id(m) for path, m in net.named_modules()}
    tensors = {k: id(v) for k, v in [*net.named_parameters(), *net.named_buffers()]}
    swap(net, "golden")
    assert {path: id(m) for path, m in net.named_modules()} == modules
    after = {k: id(v) for k, v in [*net.named_parameters(), *net.named_buffers()]}
    assert {k: after[k] for k in tensors} == tensors
    assert net.again is net.norm is net.head[1]
    assert not net.flat.training
    assert net.stem[1].training
    assert not net.flat.weight.requires_grad
    assert net.norm.note == "mine"
    net(X).sum().backward()
    net.load_state_dict(net.state_dict())
    assert Counter(calls) == Counter([*of_calls * 2, "gradient", *of_states])


def test_settings_buffers_and_children_of_a_layer_survive():
    norm = nn.BatchNorm2d(
        4, eps=0.1, momentum=None, affine=False, track_running_stats=False
    )
    norm.register_buffer("mine", torch.ones(3), persistent=False)
    norm.child = nn.Linear(2, 2)
    keys = set(norm.state_dict())
    assert swap(norm, "golden") is norm
    assert str(plan(norm)).splitlines()[1].startswith("(the model itself)")
    assert (str(norm.eps), norm.momentum, norm.running_mean) == ("0.1", None, None)
    assert torch.equal(norm.mine, torch.ones(3))
    assert set(norm.state_dict()) == keys == {"child.weight", "child.bias"}
    x = torch.randn(8, 4, 3, 3)
    expected = nn.BatchNorm2d(4, eps=0.1, affine=False)(x) * GOLDEN**0.5
    # No statistics: the batch's, in eval too.
    torch.testing.assert_close(norm.eval()(x), expected)


def test_swapping_twice_changes_nothing_and_another_mode_sets_it(net):
    swap(net, "golden", track_running_stats=True)
    net(X)
    before = frozen(net)
    swap(net, "golden")
    assert_frozen(net, before)
    swap(net, 0.5)
    assert {row.module.target_variance for row in plan(net)} == {0.5}
    assert net.norm.watched_count == 2
    set_mode(net, "standard")
    assert {row.module.target_variance for row in plan(net)} == {1.0}


def test_wrong_options_leave_the_model_as_it_was(net):
    before = frozen(net)
    names = ({"mode": "gold"}, {"backend": "cuda"}, {"autocast_output": "half"})
    for bad in (*names, {"include": "lyaer*"}):
        with pytest.raises(ValueError, match="normplug"):
            swap(net, **bad)
        with pytest.raises(ValueError, match="normplug"):
            normplug.swapped(net, **bad).__enter__()
        assert_frozen(net, before)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "options", [{"mode": 0.5, "preserve_output": True}, {"sync": True}]
)
def test_a_failing_swap_leaves_the_model_as_it_was(net, options, inference):
    net.stubborn = Stubborn(4)  # the last
    before = frozen(net)
    with torch.inference_mode(inference), pytest.raises(MemoryError):
        swap(net, **options)
    assert_frozen(net, before)
    train_step(net)


@pytest.mark.parametrize("call", [swap, set_mode])
def test_a_warning_of_lost_layers_changes_nothing_where_warnings_are_errors(net, call):
    swap(net, "golden")
    net.flat = nn.BatchNorm1d(8)
    before = frozen(net)
    text = f"normplug.{call.__name__}: another tool has rebuilt or .*: flat."
    with pytest.raises(UserWarning, match=text):
        call(net, 0.5)
    assert_frozen(net, before)
    assert net.norm.mode.name == "golden"


@pytest.mark.parametrize(
    "call",
    [
        lambda net: swap(net, exclude="typo"),
        lambda net: plan(net, exclude="typo"),
        lambda net: normplug.swapped(net, exclude="typo").__enter__(),
        lambda net: swap(nn.ReLU()),
        lambda net: normplug.fuse(nn.ReLU()),
        lambda net: [swap(net), setattr(net, "flat", nn.BatchNorm1d(8)), unswap(net)],
    ],
)
def test_a_warning_names_the_users_line(net, call):
    with pytest.warns(UserWarning, match="normplug") as warned:
        call(net)
    assert [w.filename for w in warned] == [__file__]


def test_a_layer_whose_forward_was_replaced_is_left_and_reported(net):
    forward = net.flat.forward
    net.flat.forward = lambda x: forward(x)
    swap(net, "golden")
    assert type(net.flat) is nn.BatchNorm1d
    assert "its forward was replaced on the instance" in str(plan(net))
    forward = net.norm.forward
    net.norm.forward = lambda x: forward(x)
    normplug.check(net)
    set_mode(net, 0.5)
    before = frozen(net)
    with pytest.raises(
        ValueError, match="the forward of norm was replaced on the instance"
    ):
        unswap(net)
    assert_frozen(net, before)
    del net.norm.forward
    unswap(net)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_torchscript_is_refused_and_its_parts_are_left(net):
    traced = torch.jit.trace(net.eval(), X)
    for call in (swap, unswap, plan, normplug.check, lambda m: set_mode(m, 1)):
        with pytest.raises(
            TypeError, match="got .*, compiled TorchScript, whose layers cannot"
        ):
            call(traced)
    model = nn.Sequential(traced, nn.LayerNorm(4))
    swap(model, "golden")
    assert type(model[1]) is LayerNorm
    (row,) = [
        line for line in str(plan(model)).splitlines() if line.startswith("0.flat ")
    ]
    assert row.endswith(" compiled TorchScript: swap before you compile")


def test_options_reach_the_layers(net):
    swap(
        net,
        "golden",
        track_running_stats=False,
        autocast_output="float32",
        backend="torch",
    )
    assert not hasattr(net.norm, "watched_mean")
    assert net.norm.autocast_output == "float32"
    assert {m.backend for m in (net.norm, net.flat, net.stem[1])} == {"torch"}
    swap(unswap(net).to("meta"))
    assert {t.device.type for t in [*net.parameters(), *net.buffers()]} == {"meta"}


@pytest.mark.parametrize("asked", [None, True, False])
def test_group_norm_and_rms_norm_track_statistics_only_if_swap_is_told_to(asked):
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.RMSNorm(4), nn.InstanceNorm1d(8))
    swap(model, "golden", track_running_stats=asked)(torch.randn(3, 8, 4))
    counts = [getattr(norm, "watched_count", None) for norm in model[:2]]
    assert counts == ([1, 1] if asked else [None, None])
    assert model[2].running_mean is None  # an InstanceNorm keeps its own setting
    assert not dict(unswap(model).named_buffers())


def test_the_mode_of_a_model_without_normplug_layers_cannot_be_set():
    with pytest.raises(ValueError, match="has no normplug layers. Use normplug.swap"):
        set_mode(nn.Linear(2, 2), "golden")


def test_a_users_subclass_stays_and_unswap_says_so():
    class Mine(LayerNorm):
        pass

    model = nn.Sequential(Mine(4), LayerNorm(4, mode="golden"))
    with pytest.warns(UserWarning, match="have no stock class to revert to and stay: 0"):
        unswap(model)
    assert type(model[0]) is Mine
    assert type(model[1]) is nn.LayerNorm
