"""Frozen norms next to tools that reset, rebuild, compile or pickle layers."""

import copy
import io
import pickle

import pytest
import torch
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from normplug import check, freeze, fuse, plan, swap, thaw, unswap
from normplug._tools import freezing
from normplug.modules.frozen import is_frozen
from programs import program
from statistics_cases import (
    KINDS,
    equal,
    images,
    layer_and_input,
    net,
    statistics,
    trained,
)

CHANGES = {"stock": lambda m: m, "swapped": swap, "fused": lambda m: fuse(swap(m))}
EACH_CHANGE = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@EACH_CHANGE
def test_averaging_of_weights_keeps_frozen_statistics(change):
    model = freeze(change(trained()))
    before = statistics(model)
    average = AveragedModel(model)
    average.update_parameters(model)
    update_bn([images(8)], average)
    assert equal(before, statistics(average.module))
    update_bn([images(8)], model)
    assert equal(before, statistics(model))


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
@EACH_CHANGE
def test_lightnings_averaging_of_weights_keeps_frozen_statistics(change, tmp_path):
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    import lightning_cases

    torch.manual_seed(0)
    net = lightning_cases.Module().net
    path = next(p for p, m in net.named_modules() if isinstance(m, nn.BatchNorm2d))
    module = lightning_cases.Module(lambda: freeze(change(net), include=path))
    before = statistics(module.net)
    averaging = callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)
    lightning_cases.fit(module, 8, tmp_path, averaging)
    after = statistics(module.net)
    for name in before:
        assert torch.equal(before[name], after[name]) is name.startswith(f"{path}.")


@EACH_CHANGE
def test_no_conversion_to_synchronised_norms_thaws_a_frozen_one(change):
    model = freeze(change(trained()), include="1")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert not model.train()[1].training
    assert type(model[4]) is nn.SyncBatchNorm
    synchronised = swap(freeze(change(trained())), sync=True).train()
    before = statistics(synchronised)
    synchronised(images(4))
    assert equal(before, statistics(synchronised))
    assert type(thaw(unswap(synchronised))[1]) is nn.BatchNorm2d


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_stock_layer_is_scripted_traced_and_exported_as_in_evaluation(kind):
    layer, x = layer_and_input(kind)
    expected = copy.deepcopy(layer).eval()(x)
    model = freeze(nn.Sequential(layer)).train()
    scripted = torch.jit.script(model)
    for mode in (True, False):
        y = scripted.train(mode)(x)
        if kind.startswith("InstanceNorm"):
            # That of torch 2.6 rounds by where its input lies in memory.
            torch.testing.assert_close(y, expected)
        else:
            assert torch.equal(y, expected)
    assert [n.op for n in fx.symbolic_trace(model).graph.nodes][1:-1] == ["call_module"]
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    torch.compiler.reset()  # each kind is one more graph of the same forward
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert is_frozen(model[0])


LOADER = """
import sys, torch
model = torch.load(sys.argv[0], weights_only=False).train()
assert "normplug" not in [name for name, module in sys.modules.items() if module]
norm, x = model[1], torch.arange(972.0).reshape(4, 3, 9, 9)
print(type(norm).__name__, norm.training, norm.running_mean.tolist())
model(x)
print(type(norm).__name__, norm.training, norm.running_mean.tolist())
"""


@pytest.mark.parametrize(
    "change",
    [freeze, lambda m: unswap(freeze(swap(m))), lambda m: unswap(swap(freeze(m)))],
)
def test_a_file_of_a_frozen_stock_model_needs_no_normplug_and_stays_frozen(
    change, tmp_path
):
    model = change(trained())
    torch.save(model, tmp_path / "model.pt")
    done = program(LOADER, tmp_path / "model.pt", hidden=["normplug"])
    expected = f"BatchNorm2d False {model[1].running_mean.tolist()}"
    assert done.stdout.splitlines() == 2 * [expected], done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_layer_is_frozen_and_is_thawed_as_it_was(kind):
    layer, x = layer_and_input(kind)
    expected, attributes = copy.deepcopy(layer).eval()(x), set(vars(layer))
    freeze(layer)
    for protocol, change in enumerate((lambda m: m, freeze, swap, copy.deepcopy)):
        file = pickle.dumps(nn.Sequential(layer), protocol)
        model = change(pickle.loads(file)).train()
        assert not model[0].training
        assert is_frozen(model[0])
        assert [row.note.rpartition("; ")[2] for row in plan(model)] == ["frozen"]
        torch.testing.assert_close(model(x), expected)
        if change in (freeze, swap):
            assert type(model[0]) is type(change(copy.deepcopy(layer)))
        if change is swap:
            check(model)
            unswap(model)
        thaw(model)
        assert type(model[0]) is type(layer)._thawed_class
        assert set(vars(model[0])) == attributes
        assert model[0].training
        assert all(p.requires_grad for p in model[0].parameters())


@pytest.mark.parametrize(
    "change", [freeze, swap, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_what_a_frozen_or_loaded_layer_holds_follows_train(change):
    timm = pytest.importorskip("timm.layers")
    layer = timm.BatchNormAct2d(4, drop_layer=nn.Dropout, act_layer=nn.PReLU)
    model = change(freeze(nn.Sequential(layer)))
    for mode in (True, False):
        model.train(mode)
        assert [model[0].training, model[0].drop.training] == [False, mode]
    trains = {name for name, p in model[0].named_parameters() if p.requires_grad}
    assert trains == {"act.weight"}


def test_a_frozen_swapped_layer_is_loaded_as_one():
    for change in (swap, lambda m: swap(m, sync=True)):
        model = change(freeze(trained()))
        loaded = pickle.loads(pickle.dumps(model)).train()
        assert type(loaded[1]) is type(model[1])
        assert equal(statistics(model), statistics(loaded))
        assert thaw(loaded)[1].training


def test_a_pickle_of_version_030_is_frozen_and_can_be_thawed():
    model = net()
    stay = object.__new__(freezing._StayInEvaluation)
    stay.__dict__ = {"layer": model[1], "training": True, "trained": ["weight", "bias"]}
    vars(model[1]).update(train=stay, training=False)
    model[1].requires_grad_(False)
    for change in (lambda m: m, swap):
        loaded = change(pickle.loads(pickle.dumps(model))).train()
        assert is_frozen(loaded[1])
        assert not loaded[1].training
        thaw(loaded)
        assert loaded[1].training
        assert "train" not in vars(loaded[1])
        assert all(p.requires_grad for p in loaded[1].parameters())


registry = []


class Doubled(nn.BatchNorm2d):
    """A user's subclass with a forward of its own, and a registry of subclasses."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        registry.append(cls)

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_users_subclass_keeps_its_forward_and_its_statistics():
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4)), 3)
    expected = copy.deepcopy(model).eval()(images(4))
    freeze(model)
    assert registry == []
    assert isinstance(model[1], Doubled)
    update_bn([images(4)], model)
    model[1].training = True
    assert torch.equal(model.train()(images(4)), expected)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each.train()(images(4)), expected)
        assert type(thaw(each)[1]) is Doubled
        assert each[1].training


def test_a_class_whose_forward_other_code_has_replaced_keeps_that_forward(monkeypatch):
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, x: x + self.training)
    model = freeze(nn.Sequential(nn.BatchNorm2d(3))).train()
    assert torch.equal(model(images(4)), images(4))


def test_a_frozen_layer_loads_checkpoints_of_every_version():
    for layer in (freeze(nn.BatchNorm2d(4)), freeze(swap(nn.BatchNorm2d(4)))):
        state = {k: v + 1 for k, v in layer.state_dict().items()}
        layer.load_state_dict(state)
        assert equal(layer.state_dict(), state)
        del state["num_batches_tracked"]  # as of torch before 0.4.1
        layer.load_state_dict(state)
        buffer = io.BytesIO()
        torch.save(layer.state_dict(), buffer)
        buffer.seek(0)
        assert torch.load(buffer, weights_only=True).keys() == layer.state_dict().keys()
