"""`statistics="safe"` in the kernels: channels that are not finite, and the count of batches."""

import copy

import pytest
import torch
from torch import nn

from batch_norm_cases import laid_out
from normplug import swap
from normplug._ops.spec import Pool
from statistics_cases import batches_with_bad_channels, safe_statistics

SHAPES = [(6, 5), (3, 9, 4, 5), (2, 20, 9, 8)]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "pooled"), [*((s, False) for s in SHAPES), (SHAPES[1], True)], ids=str
)
def test_a_channel_that_is_not_finite_leaves_its_statistics(
    shape, pooled, layout, momentum
):
    norm = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    ours = swap(norm(shape[1], momentum=momentum), backend="triton", statistics="safe")
    plain = swap(norm(shape[1], momentum=momentum), backend="triton")
    options = ("relu", Pool((2, 2), (2, 2), (0, 0), False)) if pooled else ()
    torch.manual_seed(0)
    for bad in ((), (2,), (0,), range(shape[1]), ()):
        x = laid_out(torch.randn(shape), layout)
        before = copy.deepcopy(ours.state_dict())
        for channel in bad:
            x[1].select(0, channel).fill_(float("inf") if channel % 2 else float("nan"))
        ours._fused(x, None, *options)
        good = [c for c in range(shape[1]) if c not in bad]
        plain.load_state_dict(before)
        plain._fused(x, None, *options)
        counts = 0 not in bad if momentum is not None else len(good) > 0
        assert ours.num_batches_tracked == before["num_batches_tracked"] + counts
        for name in ("running_mean", "running_var"):
            got, was, moved = getattr(ours, name), before[name], getattr(plain, name)
            assert torch.equal(got[list(bad)], was[list(bad)])
            assert torch.equal(got[good], moved[good])


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("compiles", [False, True])
def test_the_kernels_follow_the_rule_of_the_documentation(compiles, kind, momentum):
    batches = batches_with_bad_channels()
    norm = kind(4, momentum=momentum, track_running_stats=True)
    layer = swap(norm, backend="triton", statistics="safe")
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    for batch in batches:
        run(batch)
    mean, var, count = safe_statistics(batches, momentum, kind is nn.InstanceNorm2d)
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var.double(), var, rtol=1e-5, atol=1e-5)
    assert layer.num_batches_tracked == count


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_in_float16_do_not_overflow(momentum):
    norm = nn.BatchNorm1d(2, momentum=momentum).half()
    layer = swap(norm, backend="triton", statistics="safe")
    for seed in range(3):
        torch.manual_seed(seed)
        layer(torch.randn(8, 2).mul(torch.tensor([1.0, 3e4])).half())
    assert layer.running_mean.isfinite().all()
    assert layer.running_var[0] != 1
    assert layer.running_var[1] == 1  # each batch has a variance of about 9e8
