"""Shared by GPU tests: steps as CUDA graphs, and a check of the free memory."""

import pytest
import torch

from accuracy import assert_same_bits

WARM_UPS = 2


def skip_below(gib):
    """Skip the test unless `gib` GiB of GPU memory are free."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def captured(step, module):
    """Capture `step(module)`; return the graph and the tensors that its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step(module)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(module)
    return graph, results


def check_replays(step, graphed, eager, x):
    """Assert that each replay of a graph of `step(graphed)` gives the same bits as `step(eager)`.

    Both modules start equal, and their buffers must stay equal; x is the input of the steps.
    """
    graph, results = captured(step, graphed)
    for _ in range(WARM_UPS):
        step(eager)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * 2 + 1)
        graph.replay()
        expected = step(eager)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert_same_bits(dict(graphed.named_buffers()), dict(eager.named_buffers()))
