import copy
import functools
import itertools
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from matrix import randomised
from normplug import LayerNorm, check, set_mode, swap, unswap
from normplug.modules.row_norms import RowNorm
from swap_cases import assert_frozen, frozen

X = torch.randn(8, 3, 6, 6)


def make():
    torch.manual_seed(0)
    body = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(128),
    )
    return randomised(nn.Sequential(*body, nn.Linear(128, 6), nn.BatchNorm1d(6)))


@pytest.fixture
def net():
    return swap(make(), "golden")


def found(model, *inputs):
    with pytest.raises(RuntimeError) as error:
        check(model, *inputs)
    return str(error.value)


def test_a_correct_model_gets_a_table(net):
    report = check(net, X)
    assert [layer.path for layer in report] == ["1", "4", "6"]
    assert len(report) == 3
    lines = str(report).splitlines()
    assert lines[1] == "1     BatchNorm2d  golden  train, eval, eval under no_grad"
    assert lines[-1] == "3 norm layers verified: 3 in mode golden"
    swap(net, 0.5, include="4")
    assert (
        check(net).summary() == "3 norm layers verified: 2 in mode golden, 1 in mode 0.5"
    )


def test_a_model_that_was_never_swapped_or_was_unswapped_is_an_error(net):
    for model in (make(), unswap(net), nn.Linear(2, 2)):
        with pytest.raises(
            ValueError, match="has no normplug layers, and no record of a swap"
        ):
            check(model)
    report = check(nn.Sequential(LayerNorm(4, mode="golden")))
    assert report.summary() == "1 norm layer verified: 1 in mode golden"


@pytest.mark.parametrize("copied", [False, True])
def test_a_layer_that_was_rebuilt_or_removed_is_found(net, copied):
    net[1] = nn.SyncBatchNorm(8)
    # Normplug's, but in the mode of its constructor.
    net[4] = LayerNorm(128, mode="standard")
    del net[6]
    if copied:
        net = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    text = found(nn.Sequential(nn.Identity(), net))
    assert "normplug.check: 3 problems found in Sequential" in text
    assert (
        "1.1: swapped in mode golden, now a SyncBatchNorm: another tool rebuilt" in text
    )
    assert "1.4: swapped in mode golden, now a LayerNorm" in text
    assert "1.6: swapped in mode golden, no longer in the model" in text


def test_records_move_with_their_layers_and_the_latest_one_counts(net):
    model = nn.ModuleDict({"a": nn.Sequential(*net[3:]), "b": net})
    swap(model, 0.5)
    set_mode(net, 0.25)  # a part; the record of the whole still says mode 0.5
    assert check(model).summary() == "3 norm layers verified: 3 in mode 0.25"
    net[1].mode = 0.5
    assert "b.1: in mode 0.5, but swapped in mode 0.25" in found(model)
    net[1].mode = 0.25
    unswap(net[4])
    assert [layer.path for layer in check(model)] == ["a.3", "b.1"]
    unswap(model)
    assert not any("normplug" in name for m in model.modules() for name in vars(m))


def test_a_layer_that_computes_something_else_is_found(net):
    stock = nn.BatchNorm2d.forward
    net[1].forward = lambda x: stock(net[1], x)
    text = found(net)
    for setting in ("train", "eval", "eval under no_grad"):
        assert (
            f"1: in {setting}, its output differs from the formula of mode golden by"
            in text
        )
    assert "rounding explains at most" in text
    assert "replaced on the instance" in text

    def stock_without_grad(x):
        return (
            stock(net[1], x)
            if not torch.is_grad_enabled()
            else type(net[1]).forward(net[1], x)
        )

    net[1].forward = stock_without_grad
    assert "1 problem found" in found(net)
    net[1].forward = lambda x: x.nope
    assert (
        "in train, its forward fails (its forward was replaced on the instance)"
        in found(net)
    )


def test_an_output_that_is_off_by_a_thousandth_is_found(net):
    forward = type(net[1]).forward
    net[1].forward = lambda x: 1.001 * forward(net[1], x)
    assert "1: in train, its output differs from the formula of mode golden by" in found(
        net
    )


@pytest.mark.parametrize("training", [True, False])
def test_check_changes_nothing(net, training, monkeypatch):
    net.append(nn.Dropout(0.5)).train(training)
    net[1].eval()
    for module in net.modules():
        module.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    ran = []  # a copy runs, since another thread may be running the layer
    with monkeypatch.context() as patch:
        forward = RowNorm.forward
        patch.setattr(RowNorm, "forward", lambda m, x: ran.append(m) or forward(m, x))
        check(net)
    assert len(ran) == 3
    assert net[4] not in ran
    y = net[6].forward(
        net[5].forward(net[4].forward(torch.randn(4, 128, requires_grad=True)))
    )
    net[4].weight.grad = torch.ones(128)
    before, state = frozen(net), torch.random.get_rng_state()
    versions = [t._version for t in net.state_dict().values()]
    flags = [m.training for m in net.modules()]
    check(net)
    assert_frozen(net, before)
    assert [t._version for t in net.state_dict().values()] == versions
    assert [m.training for m in net.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(net[4].weight.grad, torch.ones(128))
    y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_judged_by_its_own_rounding(net, dtype):
    check(net.to(dtype))
    net[4].target_variance = 0.65
    set_mode(net, 0.65)
    stock = nn.LayerNorm.forward
    net[4].forward = lambda x: stock(net[4], x)
    assert "4: in eval, its output differs" in found(net)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm3d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False, momentum=None),
        nn.SyncBatchNorm(4),
        nn.LayerNorm((2, 3), elementwise_affine=False),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, track_running_stats=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("sync", [False, True])
def test_every_kind_of_layer_is_compared(norm, sync):
    norm = swap(copy.deepcopy(norm), "golden", sync=sync)
    assert [layer.tested for layer in check(norm)] == ["train, eval, eval under no_grad"]
    with torch.inference_mode():
        check(norm)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight[0] = torch.nan
        check(norm)


class WithRelu(LayerNorm):
    def forward(self, x):
        return super().forward(x).relu()


def test_layers_that_cannot_be_compared_are_reported_with_the_reason():
    assert "not compared: a subclass with a forward of its own" in str(check(WithRelu(4)))
    assert "not compared: on the meta device" in str(
        check(swap(make().to("meta"), "golden"))
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_the_kernels_are_compared_too(net, dtype):
    state = torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.bfloat16):
        check(net.to("cuda", dtype))
    check(net, X.to("cuda", dtype))
    assert torch.equal(torch.cuda.get_rng_state(), state)


class Sums(nn.Module):
    """Reads its norm's weight in evaluation if `bypasses`."""

    def __init__(self, bypasses):
        super().__init__()
        self.norm, self.bypasses = nn.LayerNorm(6), bypasses

    def forward(self, input, other=None):
        x = input if other is None else input + other
        if self.bypasses and not self.training:
            return nn.functional.layer_norm(x, (6,), self.norm.weight, self.norm.bias)
        return self.norm(x)


x, y = torch.randn(2, 4, 6)
FORMS = {
    "one argument": (x,),
    "several arguments": (x, y),
    "keywords with labels": ({"input": x, "labels": y},),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_batch_may_be_what_a_training_step_gets(form):
    batch = FORMS[form]
    text = found(swap(Sums(bypasses=True), "golden"), *batch)
    assert (
        "the whole model: in eval, its output differs from the unswapped model's by"
        in text
    )
    assert "in train," not in text
    model = swap(Sums(bypasses=False), "golden")
    assert len(check(model, *batch)) == len(check(model, x, other=y)) == 1
    check(swap(Sums(bypasses=True)), *batch)  # the same function as before


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_errors_of_the_model_and_outputs_without_numbers_are_named():
    with pytest.raises(RuntimeError, match="must match the size"):
        # The model's own error.
        check(swap(Sums(bypasses=False), "golden"), x, torch.ones(7))
    model = swap(
        nn.Sequential(nn.Softmax(1), nn.LayerNorm(4), Function(torch.argmax)), "golden"
    )
    with pytest.raises(ValueError, match="output for these inputs has no float tensor"):
        check(model, torch.randn(2, 4))


def test_the_callers_tensors_are_copied():
    in_place = Function(lambda x: x.sub_(0.45).div_(0.22))
    model = swap(nn.Sequential(in_place, nn.BatchNorm2d(3)), "golden")
    leaf = torch.rand(2, 3, 4, 4)
    computed = torch.rand(2, 3, 4, 4, requires_grad=True) * 1  # autograd has saved it
    before = leaf.clone(), computed.clone()
    for batch in (leaf, computed, (leaf, computed)):
        check(model, batch)
    assert torch.equal(leaf, before[0])
    assert torch.equal(computed, before[1])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_random_models_are_compared_and_all_generators_are_put_back(draw):
    noise = Function(lambda x: x + draw())
    model = swap(nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), noise), "golden")
    x, before = torch.randn(8, 6), frozen(model)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    check(model, x)
    assert_frozen(model, before)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_model_that_differs_from_itself_is_told_apart():
    calls = itertools.count()
    counted = Function(lambda x: x + next(calls))
    model = swap(nn.Sequential(nn.BatchNorm1d(6), counted), "golden")
    text = "in train, eval, eval under no_grad, two calls of Sequential with this batch differ by 6"
    with pytest.warns(UserWarning, match=text) as caught:
        report = check(model, torch.randn(8, 6))
    assert caught[0].filename == __file__
    assert len(report) == 1


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_models_with_computed_tensors_are_copied():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6))
    model[1].seen = []
    model[1].register_forward_hook(lambda layer, _, y: layer.seen.append(y))
    x = torch.randn(8, 6)
    swap(model, "golden")(x).sum().backward()
    assert len(check(model, x)) == 1
    model.lock = threading.Lock()
    with pytest.raises(
        TypeError, match="Sequential cannot be copied, .*lock.* without a batch"
    ):
        check(model, x)


def test_a_layer_that_its_copy_replaces_is_not_rebuilt(net):
    net[1] = copy.deepcopy(net[1])
    check(net)
    unswap(net)  # without a warning of lost layers


def test_a_layer_that_was_replaced_is_neither_copied_nor_pickled():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(100_000), nn.LayerNorm(4))
    swap(model, "golden")
    model[1].register_forward_hook(lambda *_: None)  # cannot be pickled
    model[1] = nn.Identity()
    assert len(pickle.dumps(model)) < 10_000
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "1: swapped in mode golden, now a Identity" in found(twin)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_later_patch_of_the_stock_class_is_found(net, monkeypatch, wrapped):
    forward = nn.LayerNorm.forward

    def patch(self, x):
        return forward(self, x) * 2

    monkeypatch.setattr(
        nn.LayerNorm, "forward", functools.wraps(forward)(patch) if wrapped else patch
    )
    assert "4: the forward of its stock class was replaced by other code" in found(net)
    expected = net.eval()(X)
    unswap(net)
    assert not torch.allclose(net(X), expected)  # stock layers run the patch
