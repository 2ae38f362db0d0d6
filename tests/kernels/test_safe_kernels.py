"""`statistics="safe"` in the kernels: channels that are not finite, and the count of batches."""

import copy

import pytest

pytest.importorskip("triton")
import torch  # noqa: E402
from torch import nn  # noqa: E402

import interpreted  # noqa: E402
from batch_norm_cases import laid_out  # noqa: E402
from normplug import swap  # noqa: E402
from normplug._ops.spec import Pool  # noqa: E402

pytestmark = interpreted.MARKS
SHAPES = [(6, 5), (3, 9, 4, 5), (2, 20, 9, 8)]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "pooled"), [*((s, False) for s in SHAPES), (SHAPES[1], True)], ids=str
)
def test_a_channel_that_is_not_finite_leaves_its_statistics(shape, pooled, layout, momentum):
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
        assert ours.num_batches_tracked == before["num_batches_tracked"] + (0 not in bad)
        for name in ("running_mean", "running_var"):
            got, was, moved = getattr(ours, name), before[name], getattr(plain, name)
            assert torch.equal(got[list(bad)], was[list(bad)])
            assert torch.equal(got[good], moved[good])
