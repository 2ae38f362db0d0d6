"""What holds for the kernels of every norm on a GPU: waiting, graphs, streams, compilers."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import group_kernel_cases
import kernel_cases
import normplug
import pool_cases
import routes
import row_cases
from accuracy import assert_same_bits, error
from calls import case_id
from graphs import check_replays
from kernel_cases import HALF
from normplug import functional

pytestmark = pytest.mark.gpu
GPU = "cuda"
LAYOUTS = ("contiguous", "channels_last")
FORMATS = (torch.contiguous_format, torch.channels_last)
FULL = "weight+bias+input_bias"


def batch(shape, layout, **options):
    options = {"residual": layout, "activation": "relu", **options}
    return kernel_cases, kernel_cases.Case(shape, **HALF, layout=layout, **options)


def group(shape, groups, layout):
    case = group_kernel_cases.Case(
        shape, groups, **HALF, layout=layout, activation="silu"
    )
    return group_kernel_cases, case


def rows(shape, **options):
    return row_cases, row_cases.Case(shape, **HALF, **options)


def pool(shape):
    return pool_cases, pool_cases.PoolCase(shape, **HALF)


# A call of each kernel, so small that others can run beside it.
SMALL = [
    batch((64, 64, 28, 28), "contiguous"),
    batch((64, 64, 28, 28), "channels_last"),
    batch((64, 128, 7, 7), "contiguous"),
    pool((8, 64, 20, 21)),
    *(group((16, 320, 32, 32), 32, layout) for layout in LAYOUTS),
    *(group((64, 64, 14, 14), 32, layout) for layout in LAYOUTS),
    *(
        rows(shape, vectors=FULL, running=torch.float32)
        for shape in [(700, 768), (20, 70_000)]
    ),
    rows((140, 16384), vectors=FULL, running=torch.float32),
    rows((700, 768), vectors="weight", centred=False),
]
# Shapes at which many programs wait for others.
LARGE = [
    batch((64, 64, 56, 56), "contiguous"),
    batch((64, 64, 56, 56), "channels_last"),
    batch((128, 256, 56, 56), "channels_last"),
    batch((256, 512, 7, 7), "contiguous"),
    batch((1024, 1000), "contiguous"),
    batch((64, 256, 28, 28), "channels_last"),
    pool((256, 64, 112, 112)),
    pool((64, 256, 15, 13)),
    *(
        rows(shape, **options)
        for shape in [
            (3, 24),
            (50_432, 768),
            (4096, 4096),
            (600, 16384),
            (300, 40_000),
            (64, 2**17),
        ]
        for options in (
            {"vectors": FULL, "running": torch.float32},
            {"residual": "contiguous"},
        )
    ),
]
ADDITIONS = [call for call in (*SMALL, *LARGE) if getattr(call[1], "residual", None)]
EACH = pytest.mark.parametrize(("cases", "case"), SMALL, ids=case_id)


@pytest.mark.parametrize(("cases", "case"), LARGE, ids=case_id)
def test_equal_calls_give_equal_bits_and_leave_the_counters_at_zero(cases, case):
    tensors = cases.make(case, GPU)
    first = cases.run(case, tensors, "triton")
    for _ in range(3):
        assert_same_bits(cases.run(case, tensors, "triton"), first)
    assert error(first["y"], cases.run(case, tensors, "torch")["y"]) < 1e-2
    routes.assert_counters_are_zero()


def test_calls_at_the_same_time_on_several_streams_give_the_usual_bits():
    tensors = [cases.make(case, GPU) for cases, case in SMALL]
    given = [(*call, each) for call, each in zip(SMALL, tensors, strict=True)]
    expected = [cases.run(case, each, "triton") for cases, case, each in given]
    streams = [torch.cuda.Stream() for _ in SMALL]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream, (cases, case, each), truth in zip(
            streams, given, expected, strict=True
        ):
            with torch.cuda.stream(stream):
                results.append((cases.run(case, each, "triton"), truth))
    torch.cuda.synchronize()
    for ours, truth in results:
        assert_same_bits(ours, truth)


@EACH
def test_tensors_may_be_unaligned(cases, case):
    aligned = cases.make(case, GPU)

    def moved(tensor):
        if tensor is None:
            return None
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=GPU)
        return flat[1:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    unaligned = type(aligned)(*(moved(t) for t in vars(aligned).values()))
    assert unaligned.x.data_ptr() % 16 != 0
    expected = cases.run(case, aligned, "triton")
    # The first call prepares a launch, which is discarded for tensors that it does not fit.
    for given in (unaligned, unaligned, aligned, unaligned):
        for name, value in cases.run(case, given, "triton").items():
            assert error(value, expected[name]) < 4e-3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("cases", "case"), ADDITIONS, ids=case_id)
def test_the_backward_can_recompute_the_output(cases, case, dtype):
    case = dataclasses.replace(case, dtype=dtype, params=None, offset=30.0)
    cases.check_recomputed(case, GPU)
    if cases is kernel_cases:
        activations = (None, "silu", "gelu", "relu6", "hardswish", ("leaky_relu", 0.2))
        changes = [{"activation": each} for each in activations]
        changes += [
            {"residual": None},
            {"residual": None, "activation": None, "training": False},
        ]
    else:
        changes = [{"vectors": ""}, {"vectors": "weight", "centred": False}]
    for change in changes:
        cases.check_recomputed(dataclasses.replace(case, **change), GPU)


def added(layer, x):
    """A LayerNorm, and an addition with another."""
    y = layer(x)
    return sum(
        functional.add_layer_norm(y, x, x.shape[1:], layer.weight, backend="triton")
    )


def pooled(layer, x):
    return layer._fused(
        x, activation="relu", pool=routes.Pool((3, 3), (2, 2), (1, 1), False)
    )


# A stock layer and its sizes, the input, and a call that is not the layer's own.
GRAPHS = [
    *((nn.BatchNorm2d, (64,), (16, 64, 28, 28), layout, None) for layout in FORMATS),
    (nn.BatchNorm2d, (256,), (32, 256, 56, 56), torch.channels_last, None),
    (nn.BatchNorm2d, (64,), (32, 64, 56, 56), torch.channels_last, pooled),
    *((nn.GroupNorm, (32, 320), (16, 320, 64, 64), layout, None) for layout in FORMATS),
    *((nn.GroupNorm, (32, 64), (64, 64, 28, 28), layout, None) for layout in FORMATS),
    *(
        (nn.LayerNorm, (width,), (count, width), torch.contiguous_format, added)
        for count, width in [(512, 768), (256, 16384), (16, 70_000)]
    ),
    (nn.RMSNorm, (96,), (512, 96), torch.contiguous_format, None),
    (nn.BatchNorm1d, (96,), (512, 96), torch.contiguous_format, None),
]


@pytest.mark.parametrize(("stock", "sizes", "shape", "layout", "call"), GRAPHS)
def test_a_cuda_graph_replays_the_step_and_updates_the_statistics(
    stock, sizes, shape, layout, call
):
    x = torch.randn(shape, device=GPU).bfloat16().contiguous(memory_format=layout)
    x.requires_grad_()
    graphed, eager = (
        normplug.swap(stock(*sizes, device=GPU), backend="triton") for _ in range(2)
    )

    def step(layer):
        y = layer(x) if call is None else call(layer, x)
        leaves = (x, *layer.parameters())
        return (y, *torch.autograd.grad(y.square().sum(), leaves))

    check_replays(step, graphed, eager, x)


COMPILED = [
    *((kernel_cases, ((8, 32, 14, 14), layout, None)) for layout in LAYOUTS),
    *(
        (row_cases, a)
        for a in itertools.product((False, True), ("contiguous", "permuted"))
    ),
    *(
        (row_cases, (residual, "contiguous", normplug.RMSNorm))
        for residual in (False, True)
    ),
    (pool_cases, ()),
]


@pytest.mark.parametrize(("cases", "arguments"), COMPILED, ids=case_id)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_one_compiled_graph_serves_other_numbers_of_rows(cases, arguments, compiler):
    cases.check_compiled(*arguments, GPU, compiler)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_never_waits_for_the_gpu(momentum):
    norms = [
        nn.BatchNorm2d(320),
        nn.GroupNorm(32, 320),
        nn.InstanceNorm2d(320),
        nn.LayerNorm(64),
    ]
    layer = normplug.swap(nn.Sequential(*norms).to(GPU))
    layer[0].momentum = layer[3].momentum = momentum
    x = torch.randn(4, 320, 64, 64, device=GPU, requires_grad=True)

    def step():
        layer(x).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
