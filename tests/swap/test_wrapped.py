"""swap, set_mode, check and unswap on models inside the wrappers that training puts them in."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import normplug
from matrix import X, folded, in_fsdp1, in_fsdp2, make, process_group
from normplug import check, plan, set_mode, swap, unswap
from swap_cases import NEEDS_GUARDS

BECOME = [
    "BatchNorm2d", "GroupNorm", "InstanceNorm2d", "BatchNorm1d", "LayerNorm", "RMSNorm",
]  # fmt: skip
WRAPPERS = {
    "DDP": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "torch.compile": lambda net: torch.compile(net, backend="eager"),
    "module.compile": lambda net: net.compile(backend="eager") or net,
    "layer.compile": lambda net: net.bn.compile(backend="eager") or net,
    "FSDP1 flat": in_fsdp1,
    "FSDP1 use_orig_params": lambda net: in_fsdp1(net, use_orig_params=True),
    "FSDP2": in_fsdp2,
    "FSDP2 on each norm": lambda net: in_fsdp2(net, net.bn, net.group, net.bn1, net.rms),
}
NAMES = [pytest.param(n, marks=NEEDS_GUARDS) if "compile" in n else n for n in WRAPPERS]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("first", ["swap", "wrap"])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_model_is_swapped_set_checked_and_unswapped(name, first):
    if name.startswith("FSDP2") and torch.__version__ < "2.14":
        pytest.skip("fully_shard before torch 2.14 does not run on the CPU")
    torch.compiler.reset()
    with process_group():
        if first == "swap":
            net = WRAPPERS[name](swap(make(), 0.3))
        else:
            net = WRAPPERS[name](make())
            assert [row.becomes for row in plan(net)] == BECOME
            net.eval()(X)  # by now, wrappers that compile have compiled the stock layers
            swap(net, 0.3)
        expected = folded(make(), 0.5)
        set_mode(net, 0.5)
        assert check(net).summary() == "6 norm layers verified: 6 in mode 0.5"
        for training in (True, False):
            torch.testing.assert_close(
                net.train(training)(X), expected.train(training)(X)
            )
        flat = name == "FSDP1 flat"
        if flat:
            with pytest.raises(ValueError, match=r"work inside FSDP\.summon_full_params"):
                unswap(net)
        with type(net).summon_full_params(net) if flat else contextlib.nullcontext():
            unswap(net)
        torch.testing.assert_close(net(X), expected(X))
        assert all(
            not type(m).__module__.startswith("normplug.modules") for m in net.modules()
        )


def test_a_layer_lost_inside_a_wrapper_is_found():
    with process_group():
        net = swap(nn.parallel.DistributedDataParallel(make()), "golden")
        assert check(net.module).summary() == check(net).summary()
        net.module.bn = nn.BatchNorm2d(8)
        for model in (net, net.module, copy.deepcopy(net.module)):
            with pytest.raises(
                RuntimeError, match="bn: swapped in mode golden, now a BatchNorm2d"
            ):
                check(model)


def test_unswap_names_accelerates_hooks_if_they_are_in_the_way():
    hooks = pytest.importorskip("accelerate.hooks")
    net = swap(make(), "golden").eval()
    expected = net(X)
    hooks.attach_align_device_hook(net, execution_device="cpu")
    torch.testing.assert_close(net(X), expected)
    normplug.check(net)
    with pytest.raises(
        ValueError, match=r"remove_hook_from_module\(model, recurse=True\)"
    ):
        unswap(net)
    hooks.remove_hook_from_module(net, recurse=True)
    torch.testing.assert_close(unswap(net)(X), expected)
    hooks.attach_align_device_hook(net, execution_device="cpu")
    notes = {row.note for row in plan(net)}
    assert notes == {
        "its forward was replaced on the instance: swap before patches and hooks"
    }
