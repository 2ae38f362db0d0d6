"""Cases of norms of rows in torch's dtypes and layouts, compared with the stock norm."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from accuracy import assert_no_worse, leaf
from batch_norm_cases import double, laid_out, with_gradients
from normplug import functional, target_variance

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make(shape, dims, dtype, affine="weight+bias", offset=3.0, strided=False):
    x = (torch.randn(shape) * 2 + offset).to(dtype)
    x = laid_out(x, "strided" if strided else "contiguous")
    row = tuple(shape[-dims:])
    weight = torch.rand(row).add(0.5).to(dtype) if "weight" in affine else None
    bias = torch.randn(row).to(dtype) if "bias" in affine else None
    return x, row, weight, bias


def compare(name, x, row, weight, bias, mode):
    """Compare our error against float64 with that of the stock norm with the folded weight."""
    scale, dy = math.sqrt(target_variance(mode)), torch.randn_like(x)
    has_bias = name == "layer_norm"
    ours = partial(getattr(functional, name), mode=mode)

    def stock(x, row, weight, *bias, eps):
        if scale != 1:
            weight = (torch.ones(row, dtype=x.dtype) if weight is None else weight) * scale
        return getattr(F, name)(x, row, weight, *bias, eps=eps)

    def run(norm, x, weight, bias, dy):
        x, weight, bias = leaf(x), leaf(weight), leaf(bias) if has_bias else None
        y = norm(x, row, weight, *[bias][:has_bias], eps=1e-5)
        return with_gradients(y, dy, x, weight, bias)

    truth = run(stock, double(x), double(weight), double(bias), dy.double())
    theirs, got = (run(norm, x, weight, bias, dy) for norm in (stock, ours))
    # For float64 input the truth, too, has roundings relative to the size of the values.
    spare = 0.0 if has_bias else 1e-13
    if has_bias and x.dtype == torch.float64:
        deviation = (x.var(correction=0) + 1e-5).sqrt()
        spare = torch.finfo(x.dtype).eps * float(x.abs().max() / deviation)
    for key in truth:
        assert_no_worse(key, got[key], theirs[key], truth[key], spare=spare)
