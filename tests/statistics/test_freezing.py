"""`freeze`, `thaw`, and frozen batch norms of other libraries.

A number is that of PyTorch's issue, whose fault the stock model shows.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from calls import saved_bytes
from normplug import check, freeze, fuse, plan, swap, thaw, unswap
from statistics_cases import equal, images, net, statistics


@pytest.mark.filterwarnings("ignore:normplug. a fused model is pickled")
@pytest.mark.filterwarnings("ignore:normplug.unswap. Sequential has no normplug layers")
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("change", [lambda m: m, swap, lambda m: fuse(swap(m))])
def test_a_frozen_norm_survives_train_swap_and_copies(kind, change):
    model = freeze(net(kind))
    before = statistics(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(change(model).train())))
    for each in (model, twin, twin.train(), unswap(twin).train()):
        each(images(4)).sum().backward()
        assert each.training
        assert not each[1].training
        assert equal(before, statistics(each))
    assert twin[1].train.layer is twin[1]


def test_thaw_gives_back_what_the_freeze_took():
    model = net()
    model[1].bias.requires_grad_(False)
    freeze(freeze(model.eval()), affine=False).train()
    assert [p.requires_grad for p in model[1].parameters()] == [False, False]
    thaw(swap(model))
    assert [p.requires_grad for p in model[1].parameters()] == [True, False]
    assert model[1].training
    assert "train" not in vars(model[1])
    before = statistics(model)
    model(images(4))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


def test_filters_and_affine():
    model = freeze(net(), exclude="4", affine=False)
    assert [model[1].training, model[4].training] == [False, True]
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="include='7' matches no norm layer"):
        freeze(net(), include="7")
    with pytest.raises(ValueError, match="no BatchNorm or InstanceNorm with running statistics"):
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
    assert all(isinstance(model[i], cls) and not list(model[i].parameters()) for i in (1, 4))
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


def test_66073_train_undoes_eval_but_not_a_freeze():
    for model, stays in ((net(), False), (freeze(swap(net())), True)):
        before = statistics(model)
        model[1].eval()
        model.train()
        model(images(4))
        assert equal(before, statistics(model)) is stays


def test_133566_a_frozen_norm_saves_an_input_that_it_does_not_need():
    """On the CPU; `test_constant_kernels.py` shows that the kernels save no input."""
    pytest.importorskip("triton")
    stock, x = nn.BatchNorm2d(3).eval(), images(4).requires_grad_()
    stock.requires_grad_(False)
    assert saved_bytes(lambda: stock(x)) > x.numel() * 4
