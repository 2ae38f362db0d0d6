"""What only a GPU can show: accuracy of its kernels, no waiting, graphs, mixed precision."""

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import batch_norm_cases
import normplug
import routes
from fuse_cases import Depthwise

pytestmark = pytest.mark.gpu
GPU = "cuda"
ROOT = Path(__file__).parents[1]


SHAPES = [(257, 33), (16, 33, 7), (32, 33, 14, 15), (4, 33, 3, 8, 9)]
OPTIONS = [("standard", 1e3), ("golden", 3.0), (2, 1e3), ("golden", 1e3), (2, 3.0)]
CALLS = itertools.product(batch_norm_cases.DTYPES, batch_norm_cases.LAYOUTS)


# Each dtype in each layout, with the shapes, modes and offsets in turns.
@pytest.mark.parametrize(
    ("dtype", "layout", "shape", "mode", "offset"),
    [
        (*call, SHAPES[i % len(SHAPES)], *OPTIONS[i % len(OPTIONS)])
        for i, call in enumerate(CALLS)
    ],
    ids=str,
)
def test_batch_norm_is_as_close_to_float64_as_torch(dtype, layout, shape, mode, offset):
    made = batch_norm_cases.make(
        shape,
        (33,),
        dtype,
        layout,
        params=torch.promote_types(dtype, torch.float32),
        offset=offset,
    )
    x, weight, bias = (tensor.to(GPU) for tensor in made)
    params = weight.dtype
    # A running mean far from the input's would overflow torch's own float16 backward in eval.
    running = (
        torch.randn(33).to(GPU, params) + offset,
        torch.rand(33).to(GPU, params) + 0.5,
    )
    for training in (True, False):
        batch_norm_cases.compare(
            "batch_norm", x, weight, bias, mode, running, training=training
        )


def gradients(net):
    return {name: parameter.grad for name, parameter in net.named_parameters()}


# Warnings of torch's CUDA graph trees, which start with an empty graph.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS, but there was no current CUDA"
)
@pytest.mark.parametrize("operators", [False, True])
def test_reduce_overhead_captures_a_fused_model_in_cuda_graphs(operators, monkeypatch):
    if operators:  # however small the input
        routes.use_operators_for_small_inputs(monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    stock = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Depthwise(),
        nn.Flatten(),
        nn.Linear(288, 4),
    ).to(GPU, memory_format=torch.channels_last)
    swapped = (
        normplug.swap(copy.deepcopy(stock), track_running_stats=True) for _ in range(2)
    )
    net, twin = map(normplug.fuse, swapped)
    compiled = torch.compile(net, mode="reduce-overhead")
    before = counters["inductor"]["cudagraph_skips"]
    for _ in range(5):  # the first steps warm up, and one is recorded
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(8, 3, 8, 8, device=GPU).to(memory_format=torch.channels_last)
        for module in (compiled, twin):
            module(x).square().sum().backward()
        torch.testing.assert_close(gradients(net), gradients(twin), rtol=1e-2, atol=1e-2)
        net.zero_grad()
        twin.zero_grad()
    assert counters["inductor"]["cudagraph_skips"] == before
    buffers = dict(net.named_buffers()), dict(twin.named_buffers())
    torch.testing.assert_close(*buffers, rtol=1e-3, atol=1e-3)


def test_train_py_uses_the_gpu_and_says_so(tmp_path):
    command = [sys.executable, ROOT / "train.py", "experiment=smoke", "model=vit_tiny"]
    subprocess.run(command, cwd=tmp_path, check=True)
    result = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert torch.cuda.get_device_name() in result["hardware"]
    assert result["precision"] == "bf16-mixed"
    assert 2**20 < result["peak_memory_bytes"] < 2**30
