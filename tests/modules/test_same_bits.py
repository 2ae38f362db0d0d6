"""In mode standard on the CPU, a swapped layer gives the bits of the stock layer.

Outputs, gradients and running statistics are compared over some steps, for every norm, in every
combination of dtypes that the stock layer takes. The last test has the exceptions of
`docs/trained.md`.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from normplug import swap

HALF = (torch.bfloat16, torch.float16)
# The dtypes of the input and of the parameters.
DTYPES = [(dtype, dtype) for dtype in (torch.float32, torch.float64, *HALF)]
DTYPES += [(dtype, torch.float32) for dtype in HALF]
IMAGES = (3, 4, 5, 6)
VOLUMES = (3, 4, 2, 3, 5)
SEQUENCES = (3, 4, 7)


def families():
    """Name -> (a function that makes a stock layer, the shape of an input)."""
    batch_norms = {
        "BatchNorm1d of (N, C)": (nn.BatchNorm1d, (6, 4)),
        "BatchNorm1d": (nn.BatchNorm1d, SEQUENCES),
        "BatchNorm2d": (nn.BatchNorm2d, IMAGES),
        "BatchNorm3d": (nn.BatchNorm3d, VOLUMES),
        "SyncBatchNorm": (nn.SyncBatchNorm, IMAGES),
        "InstanceNorm1d": (nn.InstanceNorm1d, SEQUENCES),
        "InstanceNorm1d of (C, L)": (nn.InstanceNorm1d, (4, 7)),
        "InstanceNorm2d": (nn.InstanceNorm2d, IMAGES),
        "InstanceNorm3d": (nn.InstanceNorm3d, VOLUMES),
    }
    options = [
        {"momentum": 0.1, "affine": True, "track_running_stats": True},
        {"momentum": None, "affine": True, "track_running_stats": True},
        {"momentum": 0.3, "affine": False, "track_running_stats": True},
        {"affine": True, "track_running_stats": False},
        {"affine": False, "track_running_stats": False, "eps": 1e-3},
    ]
    found = {}
    for name, (kind, shape) in batch_norms.items():
        # Classes of other dimensions share the code.
        all_of_it = name in ("BatchNorm2d", "InstanceNorm2d")
        for given in options if all_of_it else options[::3]:
            shown = ", ".join(f"{key}={value}" for key, value in given.items())
            found[f"{name}({shown})"] = (partial(kind, 4, **given), shape)
    others = {
        "InstanceNorm2d with an eps of 0": partial(nn.InstanceNorm2d, 4, eps=0),
        "GroupNorm": partial(nn.GroupNorm, 2, 4),
        "GroupNorm without affine": partial(nn.GroupNorm, 2, 4, affine=False),
        "LayerNorm": partial(nn.LayerNorm, 6),
        "LayerNorm of two dimensions": partial(nn.LayerNorm, (5, 6)),
        "LayerNorm without bias": partial(nn.LayerNorm, 6, bias=False),
        "LayerNorm without affine": partial(nn.LayerNorm, 6, elementwise_affine=False),
        "RMSNorm": partial(nn.RMSNorm, 6),
        "RMSNorm with eps": partial(nn.RMSNorm, 6, eps=1e-3),
        "RMSNorm without affine": partial(nn.RMSNorm, 6, elementwise_affine=False),
    }
    return {**found, **{name: (make, IMAGES) for name, make in others.items()}}


FAMILIES = families()


def pair(make, params):
    """A stock layer with random parameters, and its swapped copy."""
    torch.manual_seed(0)
    stock = make().to(params)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return stock, swap(copy.deepcopy(stock))


def run(layer, shape, dtype, layout, expands=False):
    """All results of three steps of training and one of evaluation, by name."""
    results = {}
    for step in range(4):
        torch.manual_seed(step)
        layer.train(step < 3)
        x = (torch.randn(shape) * 2 + 1).to(dtype)
        if layout == "transposed":
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        x.requires_grad_()
        y = layer(x)
        dy = torch.randn(1 if expands else y.shape).to(y.dtype).expand(y.shape)
        names = ["x", *(name for name, _ in layer.named_parameters())]
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        results[f"y of step {step}"] = y.detach()
        for name, gradient in zip(names, gradients, strict=True):
            results[f"gradient of {name} in step {step}"] = gradient
        for name, buffer in layer.state_dict().items():
            results[f"{name} after step {step}"] = buffer.clone()
    return results


def differences(stock, swapped):
    """The names of the results whose dtypes or bits differ."""
    assert stock.keys() == swapped.keys()
    return [
        name
        for name, expected in stock.items()
        if swapped[name].dtype != expected.dtype
        or not torch.equal(swapped[name], expected)
    ]


# torch itself warns of an RMSNorm of two dtypes.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("dtype", "params"), DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_swapped_layer_gives_the_bits_of_the_stock_layer(name, dtype, params):
    make, shape = FAMILIES[name]
    if (
        torch.__version__.startswith("2.6.")
        and name.startswith("RMSNorm")
        and dtype != params
    ):
        pytest.skip("in torch 2.6, an RMSNorm of these dtypes returns float32")
    for layout in ("contiguous", "transposed"):
        stock, swapped = (
            run(layer, shape, dtype, layout) for layer in pair(make, params)
        )
        assert differences(stock, swapped) == []


@pytest.mark.parametrize("momentum", [0.1, None])
def test_safe_statistics_of_good_batches_have_the_same_bits(momentum):
    stock, layer = pair(partial(nn.BatchNorm2d, 4, momentum=momentum), torch.float32)
    swap(layer, statistics="safe")
    results = (run(each, IMAGES, torch.float32, "contiguous") for each in (stock, layer))
    assert differences(*results) == []


def test_torch_is_wrong_where_one_sample_meets_an_expanded_gradient():
    make = partial(nn.InstanceNorm2d, 4, affine=True)
    stock, layer = pair(make, torch.float64)
    results = [
        run(each, IMAGES[1:], torch.float64, "contiguous", True)
        for each in (stock, layer)
    ]
    found = differences(*results)
    assert found
    assert all(name.startswith("gradient") for name in found)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(IMAGES[1:]).mul(2).add(1).double().requires_grad_()
        dy = torch.randn(1).double()
        var, mean = torch.var_mean(x, (1, 2), correction=0, keepdim=True)
        weight, bias = (
            each.detach().reshape(4, 1, 1) for each in (stock.weight, stock.bias)
        )
        weight.requires_grad_()
        y = weight * (x - mean) / torch.sqrt(var + stock.eps) + bias
        dx, dweight = torch.autograd.grad(y, [x, weight], dy.expand(y.shape))
        got = results[1]
        torch.testing.assert_close(got[f"gradient of x in step {step}"], dx)
        torch.testing.assert_close(
            got[f"gradient of weight in step {step}"], dweight.flatten()
        )
