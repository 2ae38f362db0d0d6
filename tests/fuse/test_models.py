"""Fused models compute what unfused ones do, and keep their modules."""

import copy
import gc
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normplug
from fuse_cases import (
    ZOO,
    Block,
    Encoder,
    Nested,
    Parts,
    Resnet,
    X,
    assert_same_after,
    assert_same_step,
    outcome,
    skip_if_not_followed,
    swapped,
    twins,
)
from matrix import process_group
from normplug import fuse, fusions, swap, unfuse, unswap
from normplug._convert import fused_modules
from programs import wait_until

# Models whose stem ends with a max pooling. ShuffleNet has its norm in another module.
POOLED = {"resnet18", "densenet121", "resnet26t of timm", "shufflenet"}

SHORTCUT = "norm that adds it"
# How many shortcuts have norms. Those of timm's `resnet26t` follow a pooling.
SHORTCUTS = {"resnet18": 3, "resnext50": 4, "regnet": 4, "resnet26t of timm": 4}


@pytest.mark.parametrize("name", ZOO)
def test_a_fused_model_computes_what_the_unfused_one_does(name, calls):
    make, count = ZOO[name]
    torch.manual_seed(0)
    model = swapped(make())
    plain = copy.deepcopy(model)
    assert fuse(model) is model
    skip_if_not_followed(model)
    labels = [row.label for row in fusions(model)]
    # A shortcut's norm runs in the call of another.
    assert sum(label not in (None, SHORTCUT) for label in labels) == count
    assert labels.count(SHORTCUT) == SHORTCUTS.get(name, 0)
    x = X if name == "block" else torch.randn(2, 3, 32, 32, dtype=torch.double)
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, x, training=training)
        assert len(calls) == count
        assert calls.count("relu, max pool") == (name in POOLED)
    assert unfuse(model) is model
    now, then = (
        {path: (type(m), vars(m).keys()) for path, m in each.named_modules()}
        for each in (model, plain)
    )
    assert now == then
    y, expected = outcome(model, x)["y"], outcome(plain, x)["y"]
    assert torch.equal(y, expected)


def test_names_parameters_and_buffers_stay_the_same_objects():
    model = swapped(nn.Sequential(Block(), Block()))
    before = {
        name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    keys = list(model.state_dict())
    fuse(model)
    after = {
        name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    assert after == before
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], Block)


def test_a_fused_model_is_freed_without_the_garbage_collector():
    model = fuse(swapped(Encoder()))
    gone = [weakref.ref(m) for m in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert all(ref() is None for ref in gone)
    finally:
        gc.enable()


def test_models_run_in_threads_while_others_are_fused_copied_and_checked():
    stock = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), Block()
    ).double()
    inside = swapped(nn.Sequential(Block(), Nested()))
    models = [stock.eval(), copy.deepcopy(inside).eval(), fuse(inside).eval()]
    stop, runs = threading.Event(), Counter()

    def until_the_end(name, step):
        try:
            while not stop.is_set():
                step()
                runs[name] += 1
        finally:
            stop.set()

    def run(model, y):
        with torch.no_grad():
            assert torch.equal(model(X), y)

    def change(model):
        fuse(model)
        assert len(fused_modules(model)) > 1
        copy.deepcopy(model)
        fusions(model)
        normplug.check(model)
        unfuse(model)

    steps = {f"model {i}": partial(run, m, m(X).detach()) for i, m in enumerate(models)}
    for i in range(2):
        steps[f"change {i}"] = partial(change, swapped(nn.Sequential(Block(), Nested())))
    with ThreadPoolExecutor(len(steps)) as pool:
        ends = [pool.submit(until_the_end, *item) for item in steps.items()]
        wait_until(lambda: stop.is_set() or all(runs[name] >= 5 for name in steps))
        stop.set()
    for end in ends:
        end.result()  # raises what the step raised


def test_unswap_unfuses_first_and_swapped_leaves_nothing_fused():
    model = Block().double()
    stock = copy.deepcopy(model)
    fuse(swapped(model))
    assert normplug.check(model, X)
    expected = outcome(model.eval(), X, training=False)["y"]
    unswap(model)
    assert type(model) is Block
    assert vars(model).keys() == vars(stock).keys()
    torch.testing.assert_close(model(X), expected)
    with normplug.swapped(model) as inside:
        fuse(inside)
        assert fused_modules(model)
    assert not fused_modules(model)
    fuse(swap(model))
    with normplug.swapped(model, 0.5):
        pass
    assert list(fused_modules(model)) == [""]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [Block, Resnet])  # the first is traced, the other edited
def test_checkpointing_a_fused_block_changes_no_result(make, reentrant, calls):
    class Checkpointed(Parts):
        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model, plain = twins(Checkpointed(block=make()))
    assert list(fused_modules(model)) == ["block"]
    assert_same_step(model, plain, X)
    assert len(calls) == 4


def test_a_fused_model_keeps_channels_last():
    model, plain = twins(
        nn.Sequential(Block(), Block()).to(memory_format=torch.channels_last)
    )
    x = X.to(memory_format=torch.channels_last)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    plain(x)
    assert_same_step(model, plain, x)


def test_a_fused_model_trains_under_distributed_data_parallel():
    model, plain = twins(Block())
    with process_group():
        assert_same_step(nn.parallel.DistributedDataParallel(model), plain, X)
        # Synchronised over processes, a norm is no longer one kernel.
        assert_same_after(partial(swap, sync=True), model, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["resnet18", "vit", "densenet121", "convnext"])
def test_fused_on_the_gpu_is_as_close_to_float64_as_unfused(name, dtype, calls):
    torch.manual_seed(0)
    exact = swapped(ZOO[name][0]()).cuda()
    for module in exact.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    size = 32 if name == "vit" else 64
    x = torch.randn(8, 3, size, size).cuda()
    errors = {}
    for fused in (True, False):
        model = copy.deepcopy(exact).to(dtype)
        if fused:
            fuse(model)
        with torch.no_grad():
            truth = exact.train()(x.to(dtype).double())
        y = model.train()(x.to(dtype)).detach()
        errors[fused] = float((y.double() - truth).norm() / truth.norm())
    assert len(calls) == ZOO[name][1]
    assert errors[True] <= 2 * errors[False] + torch.finfo(dtype).eps
