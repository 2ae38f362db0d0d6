"""Calls of every norm in torch's dtypes and layouts, compared with the stock norm and float64."""

import math

import torch
import torch.nn.functional as F

from accuracy import assert_no_worse, assert_same_bits, leaf
from normplug import functional, target_variance

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["contiguous", "channels_last", "strided"]


def laid_out(x, layout):
    if layout == "channels_last":  # for any number of dimensions
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "strided":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if layout == "expanded":
        return x.flatten()[0].expand(x.shape)
    return x.contiguous()


def make(
    shape,
    vector,
    dtype,
    layout="contiguous",
    affine="weight+bias",
    params=None,
    offset=3.0,
):
    """x, and a weight and a bias of the shape `vector`."""
    x = laid_out((torch.randn(shape) * 2 + offset).to(dtype), layout)
    weight = (
        torch.rand(vector).add(0.5).to(params or dtype) if "weight" in affine else None
    )
    bias = torch.randn(vector).to(params or dtype) if "bias" in affine else None
    return x, weight, bias


def run(norm, tensors, dy, **options):
    """Run forward and backward; return all results by name."""
    statistics = {n: t.clone() for n, t in tensors.items() if n.startswith("running")}
    leaves = {
        n: leaf(t) for n, t in tensors.items() if n not in statistics and t is not None
    }
    y = norm(**{**tensors, **leaves, **statistics}, **options)
    gradients = torch.autograd.grad(y, [*leaves.values()], dy.to(y.dtype))
    named = zip(leaves, gradients, strict=True)
    return {"y": y.detach(), **{f"d{name}": t for name, t in named}, **statistics}


def compare(name, x, weight, bias, mode, running=None, **options):
    """Compare our error against float64 with that of the stock norm with the folded weight.

    On the CPU, ours must have the stock norm's bits in mode standard. options: other arguments of
    both.
    """
    root, dy = math.sqrt(target_variance(mode)), torch.randn_like(x)
    tensors = {"input": x, "weight": weight}
    if name != "rms_norm":
        tensors["bias"] = bias
    if running is not None:
        tensors |= {"running_mean": running[0], "running_var": running[1]}
    vector = options.get("normalized_shape", x.shape[1:2])

    def stock(input, weight, **others):
        if root != 1 and weight is None:
            vectors = (others.get(each) for each in ("bias", "running_mean"))
            like = next((t for t in vectors if t is not None), input)
            weight = torch.ones(vector, dtype=like.dtype, device=x.device)
        return getattr(F, name)(
            input, weight=weight if root == 1 else weight * root, **others
        )

    exact = {n: t if t is None else t.double() for n, t in tensors.items()}
    truth, theirs = (
        run(stock, exact, dy.double(), **options),
        run(stock, tensors, dy, **options),
    )
    ours = run(getattr(functional, name), tensors, dy, mode=mode, **options)
    if root == 1 and x.is_cpu:
        assert_same_bits(ours, theirs)
    for key, value in truth.items():
        assert_no_worse(key, ours[key], theirs[key], value, spare=spare_of(name, x))
    return ours


def spare_of(name, x):
    """What to allow where the truth in the input's own float64 is no better than the results."""
    if x.dtype != torch.float64:
        return 0.0
    eps = torch.finfo(x.dtype).eps
    if name == "rms_norm":
        return 1e-13
    if name == "layer_norm":
        return eps * float(x.abs().max() / (x.var(correction=0) + 1e-5).sqrt())
    # mean >> std amplifies the roundings of the mean.
    return 64 * eps * (float(1 + x.mean().abs() / x.std()) if x.numel() > 1 else 1.0)
