"""The kernels where they run in parallel: waiting, graphs, streams, compilers, sizes, alignment."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
import routes
from graphs import check_replays
from kernel_cases import Case, check_recomputed
from normplug import functional

pytestmark = pytest.mark.gpu
GPU = "cuda"
GOLDEN = math.sqrt(normplug.target_variance("golden"))


def error(value, truth):
    truth = truth.detach().double()
    return float((value.detach().double() - truth).norm() / truth.norm().clamp_min(1e-300))


def make(shape, dtype=torch.bfloat16, innermost=False, offset=3.0):
    x = (torch.randn(shape, device=GPU) * 2 + offset).to(dtype)
    if innermost:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    params = torch.promote_types(dtype, torch.float32)
    weight = (torch.rand(shape[1], device=GPU) + 0.5).to(params)
    return x, weight, torch.randn(shape[1], device=GPU).to(params)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("offset", [3.0, 1e3])
@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize(
    "shape", [(257, 33), (32, 33, 14, 15), (4096, 64), (64, 512, 7, 7), (16, 64, 40, 40)], ids=str
)
def test_float64_is_torchs_to_its_last_digits(shape, innermost, offset):
    x, weight, bias = make(shape, torch.float64, innermost, offset)
    mean, var = torch.randn_like(weight) + offset, torch.rand_like(weight) + 0.5
    dy = torch.randn_like(x)
    for training in (True, False):
        results = []
        for backend in ("triton", "torch"):
            inputs, running = leaves(x, weight, bias), (mean.clone(), var.clone())
            y = functional.batch_norm(
                inputs[0], *running, *inputs[1:], training, mode="golden", backend=backend
            )
            results.append([y.detach(), *torch.autograd.grad(y, inputs, dy), *running])
        for ours, theirs in zip(*results, strict=True):
            assert error(ours, theirs) < 5e-12


@pytest.mark.parametrize(
    ("shape", "innermost"),
    [
        ((64, 64, 56, 56), False),
        ((64, 64, 56, 56), True),
        ((128, 256, 56, 56), True),
        ((256, 512, 7, 7), False),
        ((1024, 1000), False),
        ((64, 256, 28, 28), True),
    ],
    ids=str,
)
def test_equal_calls_give_equal_bits_and_leave_the_counters_at_zero(shape, innermost):
    x, weight, bias = make(shape, innermost=innermost)
    dy, residual = torch.randn_like(x), torch.randn_like(x)
    first = None
    for _ in range(4):
        mean, var = torch.zeros_like(weight), torch.ones_like(weight)
        inputs = leaves(x, weight, bias, residual)
        y = functional.batch_norm(
            inputs[0],
            mean,
            var,
            *inputs[1:3],
            True,
            residual=inputs[3],
            activation="relu",
            backend="triton",
        )
        results = [y.detach(), *torch.autograd.grad(y, inputs, dy), mean, var]
        if first is not None:
            assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))
        first = results
    plain = F.batch_norm(x.float(), None, None, weight * GOLDEN, bias, True)
    assert error(first[0], F.relu(plain + residual.float())) < 4e-3
    routes.assert_counters_are_zero()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(5, 3), (1024, 1000), (257, 33, 7, 7), (32, 64, 56, 56), (128, 256, 14, 14), (8, 33, 90, 91)],
    ids=str,
)
def test_the_result_is_had_again_from_what_the_backward_needs(shape, dtype, layout):
    for activation in (None, "relu", "silu", "gelu", "relu6", "hardswish"):
        for residual in (None, layout):
            case = Case(shape, dtype, layout, residual=residual, activation=activation, offset=30.0)
            check_recomputed(case, GPU)
    check_recomputed(Case(shape, dtype, layout, affine="weight", training=False), GPU)
    check_recomputed(Case(shape, dtype, layout, params=torch.float32, mode="standard"), GPU)


# A graph is captured on a stream of its own, and gradients then accumulate on another.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(16, 64, 28, 28), (32, 256, 56, 56)], ids=str)
def test_a_graph_replays_the_step_and_moves_the_statistics(shape, memory_format):
    x = make(shape)[0].contiguous(memory_format=memory_format).requires_grad_()
    graphed, eager = (normplug.BatchNorm2d(shape[1]).to(GPU) for _ in range(2))
    dy = torch.randn_like(x)

    def step(layer):
        y = layer(x)
        return (y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy))

    check_replays(step, graphed, eager, x)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "innermost"),
    [((8, 16, 20, 20), False), ((8, 16, 6, 6), True), ((64, 24), False)],
    ids=str,
)
def test_the_operators_keep_torchs_rules(shape, innermost, training, activation):
    x, weight, bias = make(shape, torch.float32, innermost)
    running = (None, None) if training else (torch.zeros_like(weight), torch.ones_like(weight))
    x, weight, bias, residual = leaves(x, weight, bias, torch.randn_like(x))
    tensors = (x, residual, weight, bias, None, *running, None)
    arguments = (*tensors, training, 1e-5, 0.618, activation, [])
    torch.library.opcheck(torch.ops.normplug.batch_norm.default, arguments)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_in_one_graph_with_other_batch_sizes(memory_format):
    layer, eager = (normplug.BatchNorm2d(32, backend="triton").to(GPU) for _ in range(2))
    compiled = torch.compile(layer, fullgraph=True)
    for batch in (8, 12, 20):
        x = torch.randn(batch, 32, 14, 14, device=GPU).contiguous(memory_format=memory_format)
        x.requires_grad_()
        dy = torch.randn_like(x)
        ours, theirs = compiled(x), eager(x)
        assert error(ours, theirs) < 1e-6
        (dx,), (expected,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
        assert error(dx, expected) < 1e-5
    assert error(layer.running_var, eager.running_var) < 1e-6
    assert layer.num_batches_tracked == 3


def test_streams_do_not_disturb_each_other():
    formats = [torch.contiguous_format, torch.channels_last, torch.contiguous_format]
    xs = [torch.randn(64, 64, 28, 28, device=GPU).contiguous(memory_format=f) for f in formats]
    layers = [normplug.BatchNorm2d(64).to(GPU) for _ in xs]
    weight, bias = torch.full((64,), GOLDEN, device=GPU), torch.zeros(64, device=GPU)
    expected = [F.batch_norm(x, None, None, weight, bias, True) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(20):
        ys = []
        for stream, layer, x in zip(streams, layers, xs, strict=True):
            with torch.cuda.stream(stream):
                ys.append(layer(x))
    torch.cuda.synchronize()
    for y, truth in zip(ys, expected, strict=True):
        assert error(y, truth) < 1e-5


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_more_than_2_to_the_31_values(memory_format):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.randn(700, 8, 640, 640, device=GPU, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=memory_format)
    weight, bias = torch.ones(8, device=GPU), torch.zeros(8, device=GPU)
    y = functional.batch_norm(x, None, None, weight, bias, True, mode="standard", backend="triton")
    for channel in (0, 7):
        values = x[:, channel].double()
        truth = (values - values.mean()) / (values.var(correction=0) + 1e-5).sqrt()
        assert error(y[:, channel], truth) < 5e-3


def test_what_is_kept_for_the_backward():
    x, weight, bias = make((32, 64, 28, 28))
    weight, bias = leaves(weight, bias)

    def kept(**options):
        sizes = {}

        def keep(tensor):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional.batch_norm(
                *leaves(x), None, None, weight, bias, True, backend="triton", **options
            )
        return sum(sizes.values()) - x.numel() * x.element_size()

    fused = kept(activation="relu")
    assert fused < 4096
    assert kept(activation="relu", residual=torch.randn_like(x)) - fused <= x.numel() // 8 + 64


def test_tensors_may_begin_anywhere_and_be_strided_and_dy_be_laid_out_otherwise():
    flat = torch.randn(1 + 8 * 16 * 12 * 12, device=GPU).bfloat16()
    strided = torch.randn(8, 16, 12, 24, device=GPU).bfloat16()[..., ::2]
    weight, bias = torch.rand(16, device=GPU) + 0.5, torch.randn(16, device=GPU)
    for x in (flat[1:].view(8, 16, 12, 12), strided):
        for _ in range(2):
            x = x.detach().requires_grad_()
            y = functional.batch_norm(
                x, None, None, weight, bias, True, mode="standard", backend="triton"
            )
            truth = F.batch_norm(x.float(), None, None, weight, bias, True)
            dy = torch.randn_like(truth).contiguous(memory_format=torch.channels_last)
            (dx,) = torch.autograd.grad(y, x, dy.bfloat16())
            (expected,) = torch.autograd.grad(truth, x, dy)
            assert error(y, truth) < 4e-3
            assert error(dx, expected) < 6e-3


def test_vmap_goes_to_torch():
    mean, var = torch.zeros(4, device=GPU), torch.ones(4, device=GPU)
    x = torch.randn(3, 8, 4, device=GPU)
    y = torch.vmap(lambda x: functional.batch_norm(x, mean, var))(x)
    expected = functional.batch_norm(x.reshape(-1, 4), mean, var).reshape(x.shape)
    assert error(y, expected) < 1e-6
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.vmap(lambda x: functional.batch_norm(x, mean, var, backend="triton"))(x)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 cannot tell that it exports"
)
def test_an_exported_model_needs_no_normplug():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), normplug.BatchNorm2d(16), nn.ReLU()).to(GPU).eval()
    image = torch.randn(8, 3, 16, 16, device=GPU)
    program = torch.export.export(model, (image,))
    assert "normplug" not in str(program.graph)
    assert error(program.module()(image), model(image)) < 1e-5


@pytest.mark.parametrize("innermost", [False, True])
def test_channel_stats_far_from_zero(innermost):
    x, *_ = make((64, 48, 30, 30), torch.float32, innermost, 1e3)
    mean, var = functional.channel_stats(x)
    exact = x.double()
    assert error(mean, exact.mean((0, 2, 3))) < 1e-6
    assert error(var, exact.var((0, 2, 3), correction=0)) < 1e-4
