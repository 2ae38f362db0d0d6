"""The running statistics of functional.instance_norm, computed by PyTorch's kernels."""

import pytest
import torch
import torch.nn.functional as F

from batch_norm_cases import make
from normplug import functional, reference, target_variance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_instance_norm_updates_its_running_statistics_as_torch_and_uses_them_in_eval(dtype):
    running = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    theirs = tuple(r.clone() for r in running)
    for step in range(3):
        x, weight, bias = make((3, 4, 5), (4,), dtype, offset=step)
        options = {"weight": weight, "bias": bias, "momentum": 0.3}
        y = functional.instance_norm(x, *running, mode="standard", **options)
        assert torch.equal(y, F.instance_norm(x, *theirs, **options))
    y = functional.instance_norm(x, *running, use_input_stats=False, mode="golden", **options)
    exact = reference.instance_norm(
        x.double(), weight.double(), bias.double(), mean=running[0], var=running[1],
        target_variance=target_variance("golden"),
    ).y  # fmt: skip
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(y.double(), exact, **tolerance)
    for ours_, theirs_ in zip(running, theirs, strict=True):
        assert torch.equal(ours_, theirs_)
