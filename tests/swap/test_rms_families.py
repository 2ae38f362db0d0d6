"""RMSNorms of other families: what a subclass declares, and what every tool makes of it."""

import copy

import pytest
import torch
from torch import nn

from normplug import _convert, check, plan, swap, unswap
from normplug.modules.eps import eps_property
from normplug.modules.rms_norm import _RMSNorm
from swap_cases import GOLDEN

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)) * 3


class Gemma(nn.Module):
    """Adds one to its weight, which starts at zero; has no normalized_shape, and no `eps`."""

    def __init__(self, width, epsilon=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (h * (1.0 + self.weight.float())).type_as(x)


class TargetGemma(_RMSNorm, Gemma):
    """`Gemma` that normalises to a target second moment."""

    _eps_name, epsilon = "epsilon", eps_property("epsilon")
    _weight_offset, _autocasts = 1.0, False

    def _affine_shape(self):
        return tuple(self.weight.shape)


_convert.register(TargetGemma, Gemma)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Gemma(6), nn.Linear(6, 6), nn.RMSNorm(6))
    for norm in (model[1], model[3]):
        nn.init.normal_(norm.weight, std=0.5)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_standard_equals_the_stock_layer_bit_for_bit(model, dtype):
    norm, x = model[1].to(dtype), X.to(dtype)
    expected = norm(x)
    assert torch.equal(swap(norm, "standard")(x), expected)


@pytest.mark.parametrize("preserve", [False, True])
def test_swap_check_and_unswap_keep_the_weight_offset(model, preserve):
    stock = copy.deepcopy(model)
    expected = stock(X)
    swap(model, "golden", preserve_output=preserve)
    assert [row.becomes for row in plan(model)] == ["TargetGemma", "RMSNorm"]
    check(model, X)
    if preserve:
        torch.testing.assert_close(model(X), expected)
    else:
        torch.testing.assert_close(model[1](X), stock[1](X) * GOLDEN**0.5)
    now = model(X)
    torch.testing.assert_close(unswap(model)(X), now)
    assert type(model[1]) is Gemma
    assert vars(model[1]).keys() == vars(stock[1]).keys()
    if preserve:
        torch.testing.assert_close(model.state_dict(), stock.state_dict())


def test_code_that_recomputes_it_by_its_own_eps_gets_nan(model):
    def recompute(norm):
        return X * torch.rsqrt(X.square().mean(-1, keepdim=True) + norm.epsilon)

    torch.testing.assert_close(recompute(model[1]), recompute(swap(model, "standard")[1]))
    assert recompute(swap(model, "golden")[1]).isnan().all()
    model[1].epsilon = 0.5
    assert (model[1]._eps, str(vars(model[1])["epsilon"])) == (0.5, "0.5")
    assert repr(model[1]).endswith("(momentum=0.1, track_running_stats=False, mode=golden)")
