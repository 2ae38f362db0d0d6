"""A network of one target variance trains as its stock network with other rates does.

docs/mathematics.md derives it, under "A whole network".
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import normplug

models = pytest.importorskip("torchvision").models
FLOAT64 = torch.float64


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=5e-3)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, weight_decay=0.1)


def trained(net, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def the_stock_equal(net, tv, make):
    """The stock network that trains as `net` swapped to `tv`, and its optimizer."""
    root = math.sqrt(tv)
    stock = copy.deepcopy(net)
    norms = [m for m in stock.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.bias /= root
    for norm in norms[1:]:
        norm.eps /= tv
    stock.fc.register_forward_pre_hook(lambda _, inputs: inputs[0] * root)
    biases = [norm.bias for norm in norms]
    others = [p for p in stock.parameters() if all(p is not bias for bias in biases)]
    group = {"params": biases}
    usual = make([torch.zeros(1)]).defaults
    factor = tv if make is sgd else root
    group |= {"lr": usual["lr"] / factor, "weight_decay": usual["weight_decay"] * factor}
    if make is adamw:
        group["eps"] = usual["eps"] * root
    return stock, make([{"params": others}, group])


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_golden_resnet_trains_as_a_stock_one_with_other_bias_rates_and_another_head(
    make,
):
    torch.manual_seed(0)
    net = models.resnet18(num_classes=10).to(FLOAT64)
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight, 1.0, 0.2)
        nn.init.normal_(norm.bias, 0.0, 0.2)
    batches = [
        (torch.randn(8, 3, 16, 16, dtype=FLOAT64), torch.randint(10, (8,)))
        for _ in range(6)
    ]
    number = normplug.target_variance("golden")
    stock, optimizer = the_stock_equal(net, number, make)
    plain = copy.deepcopy(net)
    ours = normplug.swap(net, "golden", preserve_output=False)

    found = trained(ours, make(ours.parameters()), batches)
    expected = trained(stock, optimizer, batches)
    for name, m in ours.named_modules():
        if isinstance(m, nn.BatchNorm2d):
            expected[f"{name}.bias"] *= math.sqrt(number)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    # Without the other rates and the scaled head, the networks part at once.
    apart = trained(plain, make(plain.parameters()), batches[:2])
    assert (apart["fc.bias"] - found["fc.bias"]).abs().max() > 1e-4
