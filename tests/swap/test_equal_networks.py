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
TARGETS = [0.25, "golden", 2.0]


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=5e-3)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, weight_decay=0.1)


class Block(nn.Module):
    """A pre-norm block of causal attention and an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def transformer():
    """A pre-norm transformer, the linear layers that read its norms, and batches."""
    blocks = [Block(16, 2) for _ in range(3)]
    net = nn.Sequential(nn.Linear(5, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 7))
    batches = [(torch.randn(4, 6, 5), torch.randint(7, (4, 6))) for _ in range(4)]
    return net, batches


def readers_of_norms(net):
    """The linear layers of `transformer` that read a norm."""
    return [each for block in net[1:4] for each in (block.qkv, block.up)] + [net[5]]


def resnet():
    """A ResNet-18 and batches."""
    net = models.resnet18(num_classes=10)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))) for _ in range(4)]
    return net, batches


def norms_of(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)]


def made(make_net):
    """A network in float64, with norms whose parameters all differ, and batches."""
    torch.manual_seed(0)
    net, batches = make_net()
    net.to(FLOAT64)
    for norm in norms_of(net):
        nn.init.normal_(norm.weight, 1.0, 0.2)
        nn.init.normal_(norm.bias, 0.0, 0.2)
    return net, [(x.to(FLOAT64), y) for x, y in batches]


def trained(net, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def group(make, parameters, root):
    """Parameters that are 1/root of those of the network they stand for, as `make` trains them."""
    usual = make([torch.zeros(1)]).defaults
    factor = root**2 if make is sgd else root
    found = {"params": parameters, "lr": usual["lr"] / factor}
    found["weight_decay"] = usual["weight_decay"] * factor
    if make is adamw:
        found["eps"] = usual["eps"] * root
    return found


def the_stock_equal(net, root, make):
    """The stock network that trains as `net` swapped to the target root**2, and its optimizer."""
    stock = copy.deepcopy(net)
    norms = norms_of(stock)
    biases = [norm.bias for norm in norms]
    readers = []
    with torch.no_grad():
        for bias in biases:
            bias /= root
        if isinstance(norms[0], nn.LayerNorm):
            readers = [linear.weight for linear in readers_of_norms(stock)]
            for weight in readers:
                weight *= root
        else:
            for norm in norms[1:]:
                norm.eps /= root**2
            stock.fc.register_forward_pre_hook(lambda _, inputs: inputs[0] * root)
    chosen = {id(p) for p in (*biases, *readers)}
    others = [p for p in stock.parameters() if id(p) not in chosen]
    groups = [{"params": others}, group(make, biases, root)]
    if readers:
        groups.append(group(make, readers, 1 / root))
    return stock, make(groups)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make_net", [resnet, transformer])
def test_a_target_variance_trains_as_a_stock_network_with_other_rates(
    make_net, target, make
):
    net, batches = made(make_net)
    root = math.sqrt(normplug.target_variance(target))
    stock, optimizer = the_stock_equal(net, root, make)
    plain = copy.deepcopy(net)
    ours = normplug.swap(net, target, preserve_output=False)

    found = trained(ours, make(ours.parameters()), batches)
    expected = trained(stock, optimizer, batches)
    for name, m in ours.named_modules():
        if isinstance(m, nn.BatchNorm2d | nn.LayerNorm):
            expected[f"{name}.bias"] *= root
    if make_net is transformer:
        names = {id(m): name for name, m in ours.named_modules()}
        for linear in readers_of_norms(ours):
            expected[f"{names[id(linear)]}.weight"] /= root
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    # Without the other rates and the scaled weights, the networks part at once.
    apart = trained(plain, make(plain.parameters()), batches[:2])
    last = list(apart)[-1]
    assert (apart[last] - found[last]).abs().max() > 1e-4
