"""Every route to GroupNorm's kernels, on tiny inputs in Triton's interpreter."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
import interpreted  # noqa: E402
import routes  # noqa: E402
from accuracy import leaf  # noqa: E402
from batch_norm_cases import laid_out  # noqa: E402
from normplug import functional, fuse, swap  # noqa: E402
from swap_cases import one_graph  # noqa: E402

pytestmark = interpreted.MARKS


def make(layout="contiguous", dtype=torch.float32):
    torch.manual_seed(0)
    x = laid_out((torch.randn(2, 4, 3, 5) * 2 + 3).to(dtype), layout)
    weight, bias = (torch.rand(2, 4) + 0.5).to(dtype)
    return x, weight, bias, torch.randn_like(x)


def group(x, weight, bias, **options):
    return functional.group_norm(x, 2, weight, bias, activation="silu", **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_instance_norm_updates_its_running_statistics_from_the_kernels(compiled):
    layers = [
        swap(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), backend=backend)
        for backend in ("triton", "torch")
    ]
    calls = [one_graph(layers[0]) if compiled else layers[0], layers[1]]
    for step in range(2):
        x = make()[0] + step
        inputs = [leaf(x) for _ in calls]
        sums = [call(x).square().sum() for call, x in zip(calls, inputs, strict=True)]
        torch.testing.assert_close(*torch.autograd.grad(sums, inputs))
    with torch.no_grad():
        torch.testing.assert_close(*(call(x) for call in calls))
    torch.testing.assert_close(*(dict(layer.named_buffers()) for layer in layers))
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(*(call(x) for call in calls))


def test_group_norm_tracks_the_statistics_that_the_kernels_compute():
    layers = [
        swap(nn.GroupNorm(2, 4), track_running_stats=True, backend=backend)
        for backend in ("triton", "torch")
    ]
    x = leaf(make()[0])
    outputs = [layer(x) for layer in layers]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(dict(layer.named_buffers()) for layer in layers))
    second = []
    for y in outputs:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        second += torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("stock", "activation"),
    [(nn.GroupNorm(2, 4), nn.ReLU6()), (nn.InstanceNorm2d(4), nn.LeakyReLU(0.2))],
)
def test_a_fused_activation_gives_the_same_result(stock, activation, monkeypatch):
    x = make("channels_last")[0]
    made = routes.watch_fused(monkeypatch)
    ours, theirs = (
        swap(nn.Sequential(copy.deepcopy(stock), activation), backend=backend)
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(fuse(ours)(x), theirs(x))
    assert len(made) == 1


def test_autocast_output_sets_the_dtype_under_autocast():
    x, weight, bias, _ = make()
    with torch.autocast("cpu", torch.bfloat16):
        low, full = (
            group(x, weight, bias, backend="triton", autocast_output=output)
            for output in ("low", "float32")
        )
    assert (low.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(low, full.to(torch.bfloat16))
