"""Cases of LayerNorm in torch's dtypes and layouts, compared with the stock kernel and float64."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from accuracy import assert_no_worse, leaf
from batch_norm_cases import double, laid_out, with_gradients
from normplug import functional, target_variance

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CASES = [((1, 64), 1), ((37, 1023), 1), ((2, 5, 16), 1), ((3, 2, 4, 8), 2), ((6,), 1), ((4, 1), 1)]


def make(shape, dims, dtype, affine="weight+bias", offset=3.0, strided=False):
    x = (torch.randn(shape) * 2 + offset).to(dtype)
    x = laid_out(x, "strided" if strided else "contiguous")
    row = tuple(shape[-dims:])
    weight = torch.rand(row).add(0.5).to(dtype) if "weight" in affine else None
    bias = torch.randn(row).to(dtype) if "bias" in affine else None
    return x, row, weight, bias


def run(norm, x, row, weight, bias, dy):
    x, weight, bias = leaf(x), leaf(weight), leaf(bias)
    return with_gradients(norm(x, row, weight, bias), dy, x, weight, bias)


def compare(x, row, weight, bias, mode):
    scale = math.sqrt(target_variance(mode))

    def stock(x, row, weight, bias):
        if scale != 1:
            ones = torch.ones(row, dtype=x.dtype, device=x.device)
            weight = (ones if weight is None else weight) * scale
        return F.layer_norm(x, row, weight, bias)

    ours = partial(functional.layer_norm, mode=mode)
    dy = torch.randn_like(x)
    truth = run(stock, double(x), row, double(weight), double(bias), dy.double())
    theirs, got = (run(norm, x, row, weight, bias, dy) for norm in (stock, ours))
    # For float64 input the truth, too, has roundings relative to the size of the values.
    spare = 0.0
    if x.dtype == torch.float64:
        deviation = (x.var(correction=0) + 1e-5).sqrt()
        spare = torch.finfo(x.dtype).eps * float(x.abs().max() / deviation)
    for name in truth:
        assert_no_worse(name, got[name], theirs[name], truth[name], spare=spare)
    return got
