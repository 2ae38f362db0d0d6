"""`swapped`, and conversions in inference mode."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

import normplug
from normplug import LayerNorm, plan, set_mode, swap, unswap
from swap_cases import Net, X, assert_frozen, frozen, train_step


class Trained(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"include": ["flat", "norm"]}, {"backend": "torch"}]
)
def test_swapped_restores_everything_except_what_was_trained(net, fails, options):
    net.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = frozen(net)
    with (
        contextlib.suppress(Trained),
        normplug.swapped(net, "golden", **options) as inside,
    ):
        assert inside is net
        assert type(net.norm) is LayerNorm
        if "include" not in options:
            assert type(net.encoder.norm1) is LayerNorm
        train_step(net)
        weight, mean = net.norm.weight.clone(), net.flat.running_mean.clone()
        if fails:
            raise Trained
    assert torch.equal(net.norm.weight, weight)
    assert torch.equal(net.flat.running_mean, mean)
    assert net.encoder.activation_relu_or_gelu == 1
    net.load_state_dict(before[1])
    assert_frozen(net, before)


def test_swapped_restores_the_mode_and_options_of_normplugs_layers(net):
    swap(net, 0.5, include="norm", autocast_output="float32")
    net(X)
    before = frozen(net)
    with normplug.swapped(net, 2, backend="torch"):
        assert {row.module.target_variance for row in plan(net)} == {2.0}
        set_mode(net, 3)
    assert_frozen(net, before)
    norm = net.norm
    assert (norm.target_variance, norm.backend, norm.autocast_output) == (
        0.5,
        "auto",
        "float32",
    )
    assert normplug.check(net).summary() == "1 norm layer verified: 1 in mode 0.5"
    with normplug.swapped(net, "golden"), normplug.swapped(net, 2):
        unswap(net)
    assert all(type(row.module).__module__.startswith("torch") for row in plan(net))


def test_swapped_with_preserve_output_keeps_the_output_on_entry_and_exit(net):
    net.bare = nn.BatchNorm1d(4, affine=False)
    net.head.append(net.bare)
    swap(net, 0.5, include="stem.*")
    net.eval()
    expected, before = net(X), frozen(net)
    with normplug.swapped(net, "golden", preserve_output=True):
        torch.testing.assert_close(net(X), expected)
        with torch.no_grad():
            net.norm.weight.mul_(3)
        trained = net(X)
    torch.testing.assert_close(net(X), trained)
    with torch.no_grad():
        net.norm.weight.div_(3)
    for now, then in zip(frozen(net)[0], before[0], strict=True):
        assert now[:3] == then[:3]
    torch.testing.assert_close(net(X), expected)


def test_swapped_removes_the_synchronisation_that_it_added(net):
    swap(net, 0.5, include="stem.*")
    swap(net, 0.5, include="flat", sync=True)
    before = frozen(net)
    with normplug.swapped(net, "golden", sync=True):
        synchronised = {type(m) for m in net.modules() if isinstance(m, nn.SyncBatchNorm)}
        assert synchronised == {normplug.SyncBatchNorm}
        assert type(net.stem[1]) is normplug.SyncBatchNorm
    assert_frozen(net, before)


def swapped_for_a_moment(model):
    with normplug.swapped(model, "golden", preserve_output=True):
        pass
    swap(model, "golden")


CONVERSIONS = {
    "swap": swap,
    "swap, preserve_output": lambda model: swap(model, "golden", preserve_output=True),
    "swap, sync": lambda model: swap(model, "golden", sync=True),
    "unswap": lambda model: unswap(swap(model, "golden")),
    "unswap, preserve_output": lambda model: unswap(
        swap(model, "golden", preserve_output=True)
    ),
    "set_mode": lambda model: set_mode(swap(model, "golden"), 0.5),
    "swapped": swapped_for_a_moment,
    "fuse": lambda model: normplug.fuse(swap(model, "golden")),
    "unfuse": lambda model: normplug.unfuse(normplug.fuse(swap(model, "golden"))),
    "check": lambda model: normplug.check(swap(model, "golden"), X),
    "plan": plan,
}


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.filterwarnings("ignore:normplug. a fused model is pickled")
def test_a_conversion_in_inference_mode_makes_tensors_that_can_be_trained(
    name, made_inside
):
    with torch.inference_mode():
        inside = Net()
    model = inside if made_inside else Net()
    model.head.append(nn.LayerNorm(4, elementwise_affine=False))
    model.bare = nn.BatchNorm1d(4, affine=False)
    model.head.append(model.bare)
    before = {id(t) for t in [*model.parameters(), *model.buffers()]}
    with torch.inference_mode():
        CONVERSIONS[name](model)
    made = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in before]
    assert not any(t.is_inference() for t in made)
    if made_inside:  # inference tensors cannot be trained
        CONVERSIONS[name](model)
        return
    for _ in range(2):
        train_step(model)
    twin = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    torch.testing.assert_close(twin.eval()(X), model.eval()(X))
