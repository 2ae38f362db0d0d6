"""The C++ path on a GPU launches without Python, and gives the Python path's bits."""

import gc
import itertools
import threading
import time

import pytest
import torch
from torch import nn

import group_kernel_cases
import kernel_cases
import normplug
import pair_cases
import pool_cases
import routes
import row_cases
from calls import case_id
from normplug import functional, native
from operator_cases import OPERATORS
from pair_cases import pair
from pool_cases import PoolCase
from routes import both_ways, is_cpp

pytestmark = pytest.mark.gpu
GPU = "cuda"
HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
Batch, Row, Group = kernel_cases.Case, row_cases.Case, group_kernel_cases.Case


@pytest.fixture(autouse=True)
def _needs_the_cpp_path():
    native.start()
    way, why, _ = native.host_path()
    if way != "C++":
        pytest.skip(f"needs the C++ path: {why}")


IMAGES = [(32, 33, 7, 7), (16, 64, 28, 28), (8, 32, 56, 56)]
SAMPLES = (4, 64, 28, 28)
KINDS = [{"dtype": HALF, "params": FLOAT}, {"dtype": FLOAT}, {"dtype": DOUBLE}]
LAYOUTS = ("contiguous", "channels_last")
FULL = {"vectors": "weight+bias+input_bias", "running": FLOAT}
CASES = [
    *OPERATORS,
    *(
        (kernel_cases, Batch(shape, layout=layout, residual=layout, activation="relu", **kind))
        for shape, kind, layout in itertools.product(IMAGES, KINDS, LAYOUTS)
    ),
    (pair_cases, pair((16, 64, 28, 28), dtype=HALF, params=FLOAT, activation="relu")),
    (pair_cases, pair((8, 32, 56, 56), {"momentum": None}, layout="channels_last")),
    (kernel_cases, Batch((1024, 1000), momentum=None)),
    (kernel_cases, Batch((16, 64, 28, 28), training=False, residual="channels_last")),
    (kernel_cases, Batch((16, 64, 28, 28), affine="", running=False, needs=("x",))),
    *((pool_cases, PoolCase((8, 64, 28, 28), **kind)) for kind in KINDS),
    *(
        (row_cases, Row((700, width), **kind, **options))
        for width, kind, options in itertools.product(
            (24, 768, 16384, 70_000), KINDS, (FULL, {"residual": "contiguous"})
        )
    ),
    *((row_cases, Row((3, 4, 6, 8), HALF, layout=layout)) for layout in row_cases.LAYOUTS),
    (row_cases, Row((64, 768), residual="contiguous", used=("y",), needs=("weight",))),
    *(
        (group_kernel_cases, Group(SAMPLES, groups, layout=layout, activation="silu", **kind))
        for groups, kind, layout in itertools.product((32, 64), KINDS, LAYOUTS)
    ),
    (row_cases, Row((700, 70_000), HALF, residual="contiguous", centred=False, weight_offset=1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "case"), CASES, ids=case_id)
def test_both_paths_give_the_same_bits(cases, case):
    tensors = cases.make(case, GPU)
    both_ways(lambda: cases.run(case, tensors, "triton"))
    routes.assert_counters_are_zero()


def leaves(shape=(64, 96), dtype=FLOAT, device=GPU):
    """x, weight, bias and residual."""
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, shape[1:], shape[1:], shape)
    made = [torch.randn(each, generator=generator) for each in shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


def step(x, weight, bias, residual):
    """Every norm, forward and backward, by name."""
    given = [x, weight, bias, residual]
    y, total = functional.add_layer_norm(
        x, residual, weight.shape, weight, bias, backend="triton"
    )
    z = functional.batch_norm(
        total.flatten(0, -2), None, None, weight, bias, training=True,
        residual=y.flatten(0, -2), activation="silu", backend="triton",
    )  # fmt: skip
    last = functional.layer_norm(z, weight.shape, weight, bias, backend="triton")
    for each in (y, z, last):
        assert is_cpp(each) == (native.path is not native.PYTHON)
    found = torch.autograd.grad(last.square().sum(), given)
    named = dict(zip(("dx", "dweight", "dbias", "dresidual"), found, strict=True))
    return {"y": y.detach(), "z": z.detach(), "last": last.detach(), **named}


def assert_all_same(ours, theirs):
    torch.cuda.synchronize()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        routes.assert_same(name, ours[name], value)


@pytest.fixture
def count(monkeypatch):
    """The launches that Python makes."""
    from normplug._kernels.launch import Launch

    launched = []
    call = Launch.__call__

    def counted(launch, *arguments):
        launched.append(launch)
        call(launch, *arguments)

    monkeypatch.setattr(Launch, "__call__", counted)
    return launched


def test_python_launches_nothing_once_a_call_is_known(count):
    given = leaves((50, 120))
    for _ in range(3):
        step(*given)
    count.clear()
    expected = step(*given)
    assert not count
    with native.python_way():
        assert_all_same(step(*given), expected)
    assert len(count) == 6


def test_channel_statistics_run_without_python(count):
    x = torch.randn(16, 24, 9, 9, device=GPU, dtype=HALF)
    for each in (x, x.contiguous(memory_format=torch.channels_last)):
        stats = [functional.channel_stats(each) for _ in range(2)]
        count.clear()
        stats.append(functional.channel_stats(each))
        assert not count
        assert all(
            torch.equal(a, b) for s in stats for a, b in zip(s, stats[0], strict=True)
        )


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        normplug.GroupNorm(4, 96),
        normplug.InstanceNorm1d(96),
        normplug.InstanceNorm1d(96, affine=True, track_running_stats=True),
    ],
    ids=str,
)
def test_group_and_instance_norms_run_without_python(layer, training, activation, count):
    layer = layer.to(GPU).train(training)
    x = torch.randn(8, 96, 32, device=GPU, requires_grad=True)
    for _ in range(3):
        y = layer._fused(x, activation=activation)
    # Which Python does.
    updates = training and getattr(layer, "running_mean", None) is not None
    count.clear()
    assert torch.equal(layer._fused(x, activation=activation), y)
    assert is_cpp(y) != updates
    assert bool(count) == updates


def test_a_side_stream_gives_the_same_bits():
    given = leaves()
    expected = both_ways(lambda: step(*given))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = [step(*given) for _ in range(5)]
    stream.synchronize()
    for result in results:
        assert_all_same(result, expected)
    routes.assert_counters_are_zero()


def test_the_backward_may_run_on_another_stream():
    x, weight, bias, _ = leaves()

    def compute(stream):
        y = functional.layer_norm(x, (96,), weight, bias, backend="triton")
        loss = y.square().sum()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = torch.autograd.grad(loss, [x, weight, bias])
        torch.cuda.synchronize()
        return dict(zip(("dx", "dweight", "dbias"), found, strict=True))

    side = torch.cuda.Stream()
    expected = compute(torch.cuda.current_stream())
    assert_all_same(both_ways(lambda: compute(side)), expected)


def test_no_memory_is_leaked():
    given = leaves((256, 96))

    def many(times):
        for _ in range(times):
            step(*given)
        torch.cuda.synchronize()
        gc.collect()
        # Autograd's thread may hold the last call's tensors a moment longer.
        time.sleep(0.5)
        return torch.cuda.memory_allocated()

    before = many(10)
    assert many(1000) == before


def test_threads_give_the_same_bits():
    shapes = [(32 + i, 96) for i in range(4)]
    tensors = [leaves(shape) for shape in shapes]
    expected = [both_ways(lambda t=t: step(*t)) for t in tensors]
    torch.cuda.synchronize()
    results = [[] for _ in shapes]

    def work(place):
        # A thread's first use of the GPU is a cached call.
        for i in range(20):
            which = (place + i) % len(shapes)
            results[place].append((which, step(*tensors[which])))
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        assert len(found) == 20
        for which, result in found:
            assert_all_same(result, expected[which])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_may_be_on_a_gpu_that_is_not_the_current_one():
    given = leaves(device="cuda:1")
    for _ in range(3):
        result = both_ways(lambda: step(*given))
        assert torch.cuda.current_device() == 0
        assert all(t.device.index == 1 for t in result.values())
    with torch.cuda.device(1):
        assert_all_same(step(*given), result)
    on_the_first = [t.detach().to("cuda:0").requires_grad_() for t in given]
    assert all(t.device.index == 0 for t in step(*on_the_first).values())


def test_an_uncompiled_layer_works_inside_a_compiled_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96)).to(GPU)
    normplug.swap(model, backend="triton")
    x = torch.randn(64, 96, device=GPU)
    expected = model(x)
    model[1] = torch.compiler.disable(model[1])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    assert model[0].weight.grad is not None
