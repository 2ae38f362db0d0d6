"""Cases of LayerNorm in torch's dtypes and layouts, compared with the stock kernel and float64."""

import math

import torch
import torch.nn.functional as F

from accuracy import assert_no_worse, leaf
from normplug import functional, target_variance

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CASES = [((1, 64), 1), ((37, 1023), 1), ((2, 5, 16), 1), ((3, 2, 4, 8), 2), ((6,), 1), ((4, 1), 1)]


def make(shape, dims, dtype, affine="weight+bias", offset=3.0, strided=False):
    x = (torch.randn(shape) * 2 + offset).to(dtype)
    if strided:
        x = torch.stack([x, x + 1], dim=-1)[..., 0]
    row = tuple(shape[-dims:])
    weight = torch.rand(row).add(0.5).to(dtype) if "weight" in affine else None
    bias = torch.randn(row).to(dtype) if "bias" in affine else None
    return x, row, weight, bias


def run(norm, x, row, weight, bias, dy):
    leaves = {"dx": leaf(x), "dweight": leaf(weight), "dbias": leaf(bias)}
    y = norm(leaves["dx"], row, leaves["dweight"], leaves["dbias"])
    leaves = {name: tensor for name, tensor in leaves.items() if tensor is not None}
    gradients = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def compare(x, row, weight, bias, mode):
    scale = math.sqrt(target_variance(mode))

    def stock(x, row, weight, bias):
        if scale != 1:
            weight = (
                torch.ones(row, dtype=x.dtype, device=x.device) if weight is None else weight
            ) * scale
        return F.layer_norm(x, row, weight, bias)

    def ours(*args):
        return functional.layer_norm(*args, mode=mode)

    def double(tensor):
        return None if tensor is None else tensor.double()

    dy = torch.randn_like(x)
    truth = run(stock, double(x), row, double(weight), double(bias), dy.double())
    theirs, got = (run(norm, x, row, weight, bias, dy) for norm in (stock, ours))
    # Of float64 input the truth, too, is rounded at the size of the values.
    spare = 0.0
    if x.dtype == torch.float64:
        deviation = (x.var(correction=0) + 1e-5).sqrt()
        spare = torch.finfo(x.dtype).eps * float(x.abs().max() / deviation)
    for name in truth:
        assert_no_worse(name, got[name], theirs[name], truth[name], spare=spare)
    return got
