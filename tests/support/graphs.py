"""What tests of a GPU share: steps of modules as CUDA graphs, and the memory that is free."""

import pytest
import torch

from accuracy import assert_same_bits

WARM_UPS = 2


def skip_below(gib):
    """Skip the test unless so much GPU memory is free."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def captured(step, module):
    """A graph of `step(module)`, and the tensors that its replays write."""
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
    """A graph of `step(graphed)` does, at each replay, what `step(eager)` does to the bit.

    Both modules are alike, and so are their buffers after each; x is what the steps read.
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
