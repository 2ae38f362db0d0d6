"""Cases of BatchNorm in torch's dtypes and layouts, compared with the stock kernel and float64."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from accuracy import assert_no_worse, leaf
from normplug import functional, target_variance

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(8, 5), (6, 5, 7), (4, 5, 6, 3), (3, 5, 2, 4, 3)]
LAYOUTS = ["contiguous", "channels_last", "strided"]


def laid_out(x, layout):
    if layout == "channels_last":  # for any number of dimensions
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "strided":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if layout == "expanded":
        return x.flatten()[0].expand(x.shape)
    return x.contiguous()


def make(shape, dtype, layout="contiguous", affine="weight+bias", params=None, offset=3.0):
    x = laid_out((torch.randn(shape) * 2 + offset).to(dtype), layout)
    params = params or dtype
    weight = torch.rand(shape[1]).add(0.5).to(params) if "weight" in affine else None
    bias = torch.randn(shape[1]).to(params) if "bias" in affine else None
    return x, weight, bias


def run(norm, x, weight, bias, dy, training=True, running=None, **options):
    """Run forward and backward; return all results by name."""
    x, weight, bias = leaf(x), leaf(weight), leaf(bias)
    mean, var = (None, None) if running is None else (r.clone() for r in running)
    y = norm(x, mean, var, weight, bias, training, **options)
    out = with_gradients(y, dy, x, weight, bias)
    return out if running is None else {**out, "mean": mean, "var": var}


def with_gradients(y, dy, x, weight, bias):
    inputs = {"dx": x, "dweight": weight, "dbias": bias}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    gradients = torch.autograd.grad(y, list(inputs.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(inputs, gradients, strict=True))}


def double(tensor):
    return None if tensor is None else tensor.double()


def compare(x, weight, bias, mode, training=True, running=None):
    """Compare our error against float64 with that of the stock kernel with the folded weight."""
    tv = target_variance(mode)
    dy = torch.randn_like(x)

    def stock(x, mean, var, weight, bias, training):
        if tv != 1:
            like = bias if bias is not None else (mean if mean is not None else x)
            ones = torch.ones(x.shape[1], dtype=like.dtype, device=x.device)
            weight = (ones if weight is None else weight) * math.sqrt(tv)
        return F.batch_norm(x, mean, var, weight, bias, training)

    ours = partial(functional.batch_norm, mode=mode)
    args = (x, weight, bias, dy, training, running)
    exact = (double(x), double(weight), double(bias), dy.double(), training)
    truth = run(stock, *exact, None if running is None else tuple(map(double, running)))
    theirs, got = run(stock, *args), run(ours, *args)
    # A truth in the input's float64 is no better than either: mean >> std amplifies its roundings.
    values = x.double()
    amplified = float(1 + values.mean().abs() / values.std()) if x.numel() > 1 else 1.0
    spare = 64 * torch.finfo(x.dtype).eps * amplified if x.dtype == torch.float64 else 0.0
    for name in truth:
        assert_no_worse(name, got[name], theirs[name], truth[name], spare=spare)
    return got
