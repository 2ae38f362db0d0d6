"""Convolutions next to a norm: outputs and gradients, and what others see of them.

They are opened to the CPU and to every dtype here. On a GPU they run where they are faster.
"""

import contextlib
import copy
import os
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fuse_cases import outcome
from matrix import process_group
from normplug import fuse, native, swap
from normplug._fuse import calls
from normplug._ops import convolutions

pytestmark = pytest.mark.skipif(
    os.environ["NORMPLUG_NATIVE"] != "1", reason="needs NORMPLUG_NATIVE=1"
)
HOST_PATH = "C++"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LAST = torch.channels_last


@pytest.fixture(autouse=True, scope="module")
def everywhere():
    native.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "DEVICES", ("cpu",))
        patch.setattr(convolutions, "ACCUMULATED", DTYPES)
        cases = dict.fromkeys(product(DTYPES, (True, False)), (3, 5, 7))
        patch.setattr(convolutions, "FLIPPED", cases)
        yield


@contextlib.contextmanager
def left_to_pytorch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "DEVICES", ())
        yield


def nodes_of(y):
    """How many convolutions of normplug are in the graph of y."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return sum(node.name() == "NormplugConvolutionBackward" for node in seen)


def operations(compute):
    """The names of the operations that run."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        compute()
    return [event.name for event in profiler.events()]


# Whole blocks.


class Bottleneck(nn.Module):
    """A block of ResNet, with a shortcut of any kind."""

    def __init__(self, width, down):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = (
            nn.Conv2d(4, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.act, self.down = nn.ReLU(inplace=True), down

    def forward(self, x):
        identity = x
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.down is not None:
            identity = self.down(x)
        y += identity
        return self.act(y)


class ShortcutFirst(Bottleneck):
    """A block of RegNet that halves the image: its shortcut runs first."""

    def __init__(self, width, kernel):
        projection = nn.Conv2d(width, width, 1, stride=2, bias=False)
        super().__init__(width, nn.Sequential(projection, nn.BatchNorm2d(width)))
        self.conv2.stride = (2, 2)

    def forward(self, x):
        identity = self.down(x)
        y = self.act(self.bn1(self.conv1(x)))
        return self.act(identity + self.bn2(self.conv2(y)))


class Inverted(nn.Module):
    """A block of MobileNet."""

    def __init__(self, width, kernel):
        super().__init__()
        inner = 2 * width
        self.layers = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()
            ),
            nn.Conv2d(inner, inner, kernel, 1, kernel // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return x + self.layers(x)


class ConvNext(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, width, kernel):
        super().__init__()
        self.conv = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


def down(name, width):
    made = {
        "identity": None,
        "convolution": nn.Conv2d(width, width, 1, bias=False),
        "norm": nn.Sequential(
            nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        ),
        "pooling": nn.Sequential(
            nn.AvgPool2d(1), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)
        ),
    }
    return made[name]


DOWNS = ("identity", "convolution", "norm", "pooling")
# Name of a block -> how to make it, and how many of its convolutions are taken.
BLOCKS = {
    **{name: (lambda w, k, name=name: Bottleneck(w, down(name, w)), 1) for name in DOWNS},
    "first": (ShortcutFirst, 1),
    "inverted": (Inverted, 2),
    "convnext": (ConvNext, 1),
}


def twins(name, width=6, kernel=3, dtype=torch.double, memory_format=LAST):
    """A block swapped and fused, and a copy that is only swapped."""
    make, _ = BLOCKS[name]
    # Only the kernels leave a convolution's bias to a LayerNorm. Launches in the interpreter keep
    # references to gradients, so that none is changed in place.
    backend = "triton" if name == "convnext" else "torch"
    plain = swap(make(width, kernel).to(dtype), backend=backend, track_running_stats=True)
    plain = plain.to(memory_format=memory_format)
    return fuse(copy.deepcopy(plain)), plain


def images(width=6, *, dtype=torch.double, memory_format=LAST, batch=2, size=4):
    x = torch.randn(batch, width, size, size, dtype=dtype) + 3
    return x.contiguous(memory_format=memory_format)


def assert_close(ours, theirs, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


class Chain(nn.Module):
    """A block between two layers, whose input also goes elsewhere if `reads`."""

    def __init__(self, block, width, reads):
        super().__init__()
        self.first = nn.Conv2d(width, width, 1)
        self.block, self.reads = block, reads

    def forward(self, x):
        x = self.first(x)
        y = self.block(x)
        return y * 2 + x.square().mean() if self.reads else y * 2


@given(
    name=st.sampled_from(list(BLOCKS)),
    width=st.sampled_from([1, 2, 6]),
    kernel=st.sampled_from([3, 5, 7]),
    size=st.integers(1, 5),
    batch=st.integers(2, 3),
    memory_format=st.sampled_from([LAST, torch.contiguous_format]),
    reads=st.booleans(),
    training=st.booleans(),
    data=st.data(),
)
def test_random_blocks_have_the_gradients_of_unfused_ones(
    name, width, kernel, size, batch, memory_format, reads, training, data
):
    block, other = twins(name, width, kernel, memory_format=memory_format)
    model, plain = Chain(block, width, reads), Chain(other, width, reads)
    plain.double(), model.double().load_state_dict(plain.state_dict())
    names = [name for name, _ in plain.named_parameters()]
    frozen = data.draw(st.sets(st.sampled_from(names), max_size=3), "frozen")
    for each in (model, plain):
        for name in frozen:
            each.get_parameter(name).requires_grad_(False)
    x = images(width, batch=batch, size=size, memory_format=memory_format)
    assert_close(
        outcome(model, x, training=training), outcome(plain, x, training=training), 1e-8
    )


@pytest.mark.parametrize("memory_format", [LAST, torch.contiguous_format])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_convolutions_of_each_block_are_taken(name, memory_format):
    model, plain = twins(name, memory_format=memory_format)
    x = images(memory_format=memory_format).requires_grad_()
    assert_close(outcome(model, x), outcome(plain, x))
    y = model(x)
    # Without channels_last, the pixels are not the rows of a matrix.
    is_row = memory_format is LAST
    count = BLOCKS[name][1] if is_row else int(name in ("inverted", "convnext"))
    assert nodes_of(y) == count
    is_added = "aten::addmm_" in operations(y.square().sum().backward)
    assert is_added == (is_row and name != "convnext")
    with left_to_pytorch():
        expected = model(x)
    assert torch.equal(y, expected)
    with native.python_way():
        by_python = model(x)
    with torch.no_grad():
        without = model(x)
    for each in (plain(x), expected, by_python, without):
        assert nodes_of(each) == 0
        assert_close(each.detach(), y.detach())


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_in_bfloat16_are_as_close_to_float64_as_pytorchs(name):
    model, plain = twins(name, dtype=torch.float32, width=16)
    x = images(16, dtype=torch.bfloat16, batch=8)
    truth = outcome(plain.double(), x.double())
    initial = copy.deepcopy(model)
    ours = outcome(model, x, low=torch.bfloat16)
    with left_to_pytorch():
        theirs = outcome(initial, x, low=torch.bfloat16)
    for key, value in truth.items():
        assert ours[key].dtype == theirs[key].dtype
        error = (ours[key].double() - value).abs().max()
        usual = (theirs[key].double() - value).abs().max()
        assert error <= 1.5 * usual + 1e-6, key


# The gradients of a 1x1 convolution and its input, which goes on to the shortcut.


def pair(dtype=torch.double, memory_format=LAST):
    """The convolution, its input, and gradients of the two results."""
    layer = nn.Conv2d(6, 4, 1, bias=False).to(dtype)
    x = images(dtype=dtype, memory_format=memory_format).requires_grad_()
    dy = images(4, dtype=dtype, memory_format=memory_format)
    dskip = images(dtype=dtype, memory_format=memory_format)
    return layer, x, dy, dskip


def gradients_of_pair(layer, x, dy, dskip):
    """The gradients of x and the weight, by PyTorch."""
    dx, dweight = torch.autograd.grad(layer(x), [x, layer.weight], dy)
    return dx + dskip, dweight


class Returned(torch.autograd.Function):
    """The identity, whose gradient is a tensor that the test chooses."""

    @staticmethod
    def forward(ctx, x, made):
        ctx.made = made
        return x.view_as(x)

    @staticmethod
    def backward(ctx, _):
        return ctx.made(), None


def fresh(dskip):
    return lambda: dskip * 1


def kept(dskip):
    return lambda: dskip


def view_of_kept(dskip):
    return lambda: dskip.view_as(dskip)


def expanded(dskip):
    return lambda: dskip[:1, :1, :1, :1].expand(dskip.shape)


def contiguous(dskip):
    return lambda: dskip.contiguous()


@pytest.mark.parametrize("made", [fresh, kept, view_of_kept, expanded, contiguous])
def test_a_gradient_is_changed_only_if_nothing_else_holds_it(made):
    layer, x, dy, dskip = pair()
    before = dskip.clone()
    y, skip = calls.fork(layer, x)
    total = (y * dy).sum() + Returned.apply(skip, made(dskip)).sum()
    names = operations(total.backward)
    assert torch.equal(dskip, before)
    assert_close(
        (x.grad, layer.weight.grad), gradients_of_pair(layer, x, dy, made(dskip)())
    )
    # In newer versions of torch, a node in Python keeps a reference to the fresh one, too.
    assert "aten::addmm_" not in names or made is fresh


@pytest.mark.parametrize(
    "holder", ["nobody", "user", "memory", "hook", "retain_grad", "grad", "sum"]
)
def test_who_holds_the_shortcuts_gradient_sees_it_unchanged(holder):
    layer, x, dy, dskip = pair()
    expected = gradients_of_pair(layer, x, dy, dskip)
    y, skip = calls.fork(layer, x)
    seen = []
    if holder == "hook":
        skip.register_hook(seen.append)
    if holder == "retain_grad":
        skip.retain_grad()
    ends, starts = [y, skip * 1], [dy, dskip.clone()]
    if holder == "user":
        ends[1] = skip
        seen.append(starts[1])
    if holder == "memory":
        ends[1] = skip.permute(0, 2, 3, 1)
        starts[1] = starts[1].permute(0, 2, 3, 1)
        seen.append(starts[1].permute(0, 3, 1, 2))
    if holder == "sum":  # both terms get one tensor
        other = torch.zeros_like(dskip, requires_grad=True)
        ends[1] = (skip + other) * 1
    if holder == "grad":
        inputs = [x, layer.weight, skip]
        found = torch.autograd.grad(ends, inputs, starts)
        seen.append(found[2])
    else:
        names = operations(lambda: torch.autograd.backward(ends, starts))
        assert "aten::addmm_" in names or holder != "nobody"
        found = (x.grad, layer.weight.grad)
    if holder == "retain_grad":
        seen.append(skip.grad)
    if holder == "sum":
        seen.append(other.grad)
    assert_close(found[:2], expected)
    assert len(seen) == (holder != "nobody")
    for each in seen:
        assert torch.equal(each, dskip)


@pytest.mark.parametrize("used", ["y", "skip", "neither"])
def test_a_result_may_be_unused(used):
    layer, x, dy, dskip = pair()
    y, skip = calls.fork(layer, x)
    ends = {"y": (y * dy).sum(), "skip": (skip * dskip).sum(), "neither": x.sum()}
    ends[used].backward()
    dx, dweight = gradients_of_pair(layer, x, dy, torch.zeros_like(x))
    expected = {"y": dx, "skip": dskip, "neither": torch.ones_like(x)}
    assert_close(x.grad, expected[used])
    assert_close(layer.weight.grad, dweight if used == "y" else None)


def test_only_the_gradients_that_are_asked_for_are_computed():
    layer, x, dy, dskip = pair()
    expected = gradients_of_pair(layer, x, dy, dskip)
    for place, needed in enumerate((x, layer.weight)):
        y, skip = calls.fork(layer, x)
        found = torch.autograd.grad([y, skip * 1], needed, [dy, dskip])
        assert_close(found[0], expected[place])


def by_fork(x, weight):
    layer = nn.Conv2d(6, 4, 1, bias=False).double()
    layer.weight = nn.Parameter(weight.detach())
    return native.path.convolve(x, weight, True)


def by_flip(x, weight):
    return native.path.convolve(x, weight, False)


def by_operator(x, weight):
    return torch.ops.normplug.depthwise_convolution(x, weight)


@pytest.mark.parametrize(
    ("function", "shape"),
    [(by_fork, (4, 6, 1, 1)), (by_flip, (6, 1, 3, 3)), (by_operator, (6, 1, 5, 5))],
)
def test_second_derivatives_are_right(function, shape):
    given = (
        images(size=3).requires_grad_(),
        torch.randn(shape).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("name", ["identity", "inverted", "convnext"])
def test_a_retained_graph_allows_one_more_backward(name):
    model, _ = twins(name)
    x = images().requires_grad_()
    y = model(x).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert_close(torch.autograd.grad(y, x), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("changed", ["x", "skip", "weight"])
def test_inputs_modified_in_place_are_detected(changed):
    layer, x, dy, dskip = pair()
    y, skip = calls.fork(layer, x)
    with torch.no_grad():
        {"x": x, "skip": skip, "weight": layer.weight}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# What surrounds a model.


@pytest.mark.parametrize("name", ["identity", "inverted", "convnext"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_give_the_same_gradients(name, reentrant):
    model, plain = twins(name)
    x = images()
    given = [x.clone().requires_grad_() for _ in range(2)]
    checkpoint(model, given[0], use_reentrant=reentrant).square().sum().backward()
    plain(given[1]).square().sum().backward()
    assert_close(given[0].grad, given[1].grad)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad)


def test_hooks_get_the_saved_tensors_as_from_pytorchs_convolution():
    layer, x, dy, _ = pair()
    depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False).double()
    for function, module in ((calls.fork, layer), (calls.convolve, depthwise)):
        saved = {}
        for way in ("ours", "pytorch"):
            seen = saved[way] = []

            def pack(t, seen=seen):
                seen.append(t)
                return t

            with saved_tensors_hooks(pack, lambda t: t):
                function(module, x) if way == "ours" else module(x)
        assert len(saved["ours"]) == 2
        for one, other in zip(saved["ours"], saved["pytorch"], strict=True):
            assert one is other


def test_a_hook_on_the_blocks_input_sees_the_whole_gradient():
    model, plain = twins("identity")
    seen = []
    for each in (model, plain):
        x = images().fill_(1).requires_grad_()
        torch.manual_seed(0)
        middle = x * torch.linspace(0, 1, x.numel()).double().view_as(x)
        middle.register_hook(lambda g: seen.append(g.clone()))
        each(middle).square().sum().backward()
    assert_close(seen[0], seen[1])


def change_hook(layer):
    layer.register_forward_hook(lambda module, args, y: y * 2)


def change_pre_hook(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def change_backward_hook(layer):
    layer.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))


def change_bias(layer):
    layer.bias = nn.Parameter(torch.ones(layer.out_channels).double())


def change_parametrized(layer):
    parametrizations.weight_norm(layer)


def change_padding_mode(layer):
    layer.padding_mode = "circular"


def change_forward(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2


CHANGES = [
    change_hook, change_pre_hook, change_backward_hook, change_bias, change_parametrized,
    change_padding_mode, change_forward,
]  # fmt: skip


# Block -> its convolutions that are taken.
TAKEN = {
    "identity": ["conv1"],
    "first": ["conv1"],
    "inverted": ["layers.0.0", "layers.1"],
    "convnext": ["conv"],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TAKEN)
def test_a_convolution_that_changes_after_fuse_is_left_to_pytorch(change, name):
    model, plain = twins(name)
    for each in (model, plain):
        for path in TAKEN[name]:
            change(each.get_submodule(path))
    plain.load_state_dict(model.state_dict())
    x = images()
    assert_close(outcome(model, x), outcome(plain, x))
    if name != "convnext" or change is not change_bias:
        assert nodes_of(model(x.requires_grad_())) == 0


@pytest.mark.parametrize("name", ["identity", "inverted"])
def test_distributed_training_has_the_same_gradients(name):
    model, plain = twins(name)
    with process_group():
        replicated = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
        for _ in range(2):  # the buckets are rebuilt after the first step
            x = images()
            assert_close(outcome(replicated, x), outcome(plain, x))


def test_a_hook_on_a_convolution_that_moves_runs_in_order():
    model, _ = twins("first")
    ran = []
    for name in ("down.0", "conv1"):
        hook = lambda module, args, y, name=name: ran.append(name)  # noqa: E731
        model.get_submodule(name).register_forward_hook(hook)
    model(images().requires_grad_())
    assert ran == ["down.0", "conv1"]


@pytest.mark.parametrize("name", ["identity", "inverted"])
def test_transforms_and_modes_run_pytorchs_convolution(name):
    model, plain = twins(name)
    model.eval(), plain.eval()
    x = images()

    def loss(each):
        return lambda x: torch.func.functional_call(each, {}, x).square().sum()

    assert_close(torch.func.grad(loss(model))(x), torch.func.grad(loss(plain))(x))
    tangents = torch.func.jvp(model, (x,), (x,)), torch.func.jvp(plain, (x,), (x,))
    assert_close(tangents[0], tangents[1])
    with torch.inference_mode():
        assert_close(model(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_for_pytorchs_convolution(dtype):
    layer = nn.Conv2d(6, 4, 1, bias=False)
    depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
    x = images(dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, skip = calls.fork(layer, x)
        assert nodes_of(y) == (dtype == torch.bfloat16)
        assert skip.dtype == dtype
        z = calls.convolve(depthwise, x)
        assert nodes_of(z) == 1
        expected = layer(x), depthwise(x)
        for ours, theirs in zip((y, z), expected, strict=True):
            assert torch.equal(ours, theirs)
            dy = torch.randn(ours.shape).bfloat16()  # in the backward, autocast is on
            found = torch.autograd.grad(ours, x, dy)
            assert found[0].dtype == dtype
            assert_close(found, torch.autograd.grad(theirs, x, dy), 0.05)


# Compilers.


@pytest.mark.parametrize("name", BLOCKS)
def test_a_compiled_block_has_the_same_step(name):
    model, plain = twins(name)
    x = images()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(outcome(compiled, x), outcome(plain, x))
    ran = operations(compiled(x.requires_grad_()).sum().backward)
    assert ("aten::flip" in ran) == (name in ("inverted", "convnext"))


def test_a_compiled_convolution_with_a_stride_is_left_to_pytorch():
    model, _ = twins("convnext")
    model.conv.stride = (2, 2)
    torch.compiler.reset()
    convolve = torch.compile(calls.convolve, backend="aot_eager", fullgraph=True)
    for layer in (
        model.conv,
        nn.Conv2d(6, 6, 9, padding=4, groups=6, bias=False).double(),
    ):
        x = images().requires_grad_()
        y = convolve(layer, x)
        assert_close(y, layer(x))
        assert "aten::flip" not in operations(y.sum().backward)


def test_a_compiled_convolution_is_pytorchs_where_that_is_faster(monkeypatch):
    monkeypatch.setattr(convolutions, "FLIPPED", {(torch.bfloat16, True): (3,)})
    layer = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
    torch.compiler.reset()
    convolve = torch.compile(calls.convolve, backend="aot_eager", fullgraph=True)
    for low in (True, False):
        x = images(dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = convolve(layer, x)
            assert_close(y, layer(x))
        assert ("aten::flip" in operations(y.sum().backward)) == low


def test_an_exported_graph_has_no_operator_of_normplug():
    model, plain = twins("inverted")
    x = images()
    program = torch.export.export(model.eval(), (x,))
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < (2, 8):  # a strict export, its default, keeps a composite operator
        program = program.run_decompositions()
    exported = program.module()
    assert_close(exported(x), plain.eval()(x))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert not any("normplug" in target for target in targets)


def test_the_operator_follows_the_rules_of_operators():
    for memory_format in (LAST, torch.contiguous_format):
        x = images(dtype=torch.float32, memory_format=memory_format).requires_grad_()
        weight = torch.randn(6, 1, 3, 3, requires_grad=True)
        operator = torch.ops.normplug.depthwise_convolution.default
        torch.library.opcheck(operator, (x, weight))
