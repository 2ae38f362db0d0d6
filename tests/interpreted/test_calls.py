"""Calls of every norm, by the kernels.

Refusals, derivatives, what is saved for the backward, and the operators that compilers see.
"""

import copy
import dataclasses
import gc
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import group_kernel_cases
import kernel_cases
import normplug
import pool_cases
import routes
import row_cases
from accuracy import assert_no_worse, assert_same_bits
from calls import INPUTS, case_id, saved_bytes
from fuse_cases import Block, Depthwise, outcome
from normplug import functional, fuse, swap, unfuse
from normplug._ops import can_run
from operator_cases import OPERATORS

X = torch.randn(4, 6)


def batch_norm(x, weight=None, **options):
    return functional.batch_norm(
        x, None, None, weight, training=True, backend="triton", **options
    )


def layer_norm(x, weight=None, **options):
    return functional.layer_norm(x, (6,), weight, backend="triton", **options)


def add_layer_norm(x, weight=None):
    return functional.add_layer_norm(x, x * 0.5, (6,), weight, backend="triton")[0]


NORMS = pytest.mark.parametrize("norm", [batch_norm, layer_norm, add_layer_norm])
ON_META, STRIDED = torch.ones(6, device="meta"), torch.ones(12)[::2]
COUNTED = {
    "running_mean": torch.zeros(()),
    "running_var": torch.ones(()),
    "num_batches_tracked": torch.tensor(0, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: batch_norm(X, ON_META), "not every tensor is on cpu"),
        (lambda: layer_norm(X, ON_META), "not every tensor is on cpu"),
        (lambda: batch_norm(X, STRIDED), "not contiguous"),
        (lambda: layer_norm(X, STRIDED), "not contiguous"),
        (lambda: layer_norm(X, input_bias=STRIDED), "not contiguous"),
        (
            lambda: batch_norm(X, residual=X.double()),
            "float32 and the residual torch.float64",
        ),
        (lambda: layer_norm(X, **COUNTED), "num_batches_tracked is torch.int32"),
        (
            lambda: batch_norm(X, num_batches_tracked=torch.tensor(0.0)),
            "num_batches_tracked is torch.float32",
        ),
    ],
)
def test_backend_triton_refuses_what_the_kernels_cannot_take_with_the_reason(call, why):
    with pytest.raises(NotImplementedError, match=f"backend='triton', but.*{why}"):
        call()


def test_a_gpu_that_cannot_run_the_kernels_is_refused_with_the_reason():
    def refusal(capability, *dtypes):
        return can_run.refusal_of_capability(capability, dtypes)

    assert refusal((7, 0), torch.float16).endswith("compute capability 7.5 or more")
    assert refusal((7, 5), torch.float16, torch.float32) is None
    assert refusal((7, 5), torch.float32, torch.bfloat16).startswith(
        "bfloat16 needs a GPU of"
    )
    assert refusal((8, 0), torch.bfloat16) is None


def test_what_the_kernels_cannot_take_falls_back_to_torch_by_default():
    for options in ({"weight": STRIDED}, COUNTED):
        assert functional.layer_norm(X, (6,), **options).shape == X.shape
    assert functional.layer_norm(X[:0], (6,)).shape == (0, 6)


@NORMS
def test_lazily_negated_and_zero_gradients_are_read_as_their_values(norm):
    x = X.clone().requires_grad_()
    y = norm(x)
    dy = torch.rand_like(y)
    (expected,) = torch.autograd.grad(y, x, -dy, retain_graph=True)
    (found,) = torch.autograd.grad(y, x, torch._neg_view(dy), retain_graph=True)
    assert torch.equal(found, expected)
    (zero,) = torch.autograd.grad(y, x, torch._efficientzerotensor(y.shape))
    assert not zero.any()
    with pytest.raises(NotImplementedError, match="negated lazily"):
        norm(torch._neg_view(X))


@NORMS
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_transforms_traces_and_empty_inputs_are_refused_with_the_reason(norm):
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(norm)(torch.randn(2, 4, 6))
    with (
        pytest.raises(NotImplementedError, match="forward-mode"),
        torch.autograd.forward_ad.dual_level(),
    ):
        norm(torch.autograd.forward_ad.make_dual(X, X))
    with pytest.raises(NotImplementedError, match="empty"):
        norm(X[:0])
    with pytest.raises(NotImplementedError, match="meta"):
        norm(X.to("meta"))
    # A trace would not record the kernels.
    with pytest.raises(
        NotImplementedError, match=r"backend='triton', but torch\.jit\.trace"
    ):
        torch.jit.trace(norm, (X,))


def test_the_total_requires_no_gradient_if_its_terms_require_none():
    weight = torch.ones(6, requires_grad=True)
    for backend in ("torch", "triton"):
        y, total = functional.add_layer_norm(X, X, (6,), weight, backend=backend)
        assert y.requires_grad
        assert not total.requires_grad


BATCH = [
    ((5, 2), None, True),
    ((5, 2), "relu", True),
    ((5, 2), "relu", False),
    ((3, 2, 2, 1), "gelu", True),
    ((2, 1, 11, 10), "silu", True),
    ((4, 2), ("leaky_relu", 0.2), False),
]
ROWS = [
    {"shape": (5, 3)},
    {"shape": (2, 2, 4), "dims": 2},
    {"shape": (4, 3), "residual": "contiguous", "vectors": "weight+bias"},
    {"shape": (4, 3), "vectors": ""},
    {"shape": (3, 4), "vectors": "weight", "centred": False, "weight_offset": 1.0},
]
WINDOW = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0)}
DERIVATIVES = [
    *(
        kernel_cases.Case(
            shape, torch.float64, training=training, residual="contiguous",
            activation=activation, offset=0.5, running=not training,
        )
        for shape, activation, training in BATCH
    ),
    *(
        row_cases.Case(
            dtype=torch.float64, offset=0.5, eps=1e-2,
            **{"vectors": "weight+bias+input_bias", **options},
        )
        for options in ROWS
    ),
    *(
        pool_cases.PoolCase((2, 2, 4, 3), torch.float64, training=training, **WINDOW)
        for training in (True, False)
    ),
    *(
        group_kernel_cases.Case((2, 4, 3), 2, torch.float64, layout, activation="silu")
        for layout in ("contiguous", "channels_last")
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", DERIVATIVES, ids=case_id)
def test_first_and_second_derivatives_are_right(case):
    cases = sys.modules[type(case).__module__]
    tensors = cases.make(case)
    if cases is pool_cases:  # no two values of a window are equal
        tensors.x.copy_(torch.randperm(tensors.x.numel()).view(tensors.x.shape) / 10)
    inputs, running = tensors.inputs(INPUTS), tensors.running(tracked=False)
    leaves = {name: t for name, t in inputs.items() if t is not None}

    def norm(*given):
        named = {**inputs, **dict(zip(leaves, given, strict=True))}
        return tuple(cases.call(case, named, "triton", **running).values())

    given = [*leaves.values()]
    assert torch.autograd.gradcheck(norm, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(norm, given, fast_mode=True)
    outputs = norm(*given)
    dys = [tensors.dy, tensors.dtotal][: len(outputs)]
    for wanted in (given, given[:1], given[-1:]):
        once = torch.autograd.grad(outputs, wanted, dys, retain_graph=True)
        twice = torch.autograd.grad(outputs, wanted, dys, create_graph=True)
        torch.testing.assert_close(once, twice)


@pytest.mark.parametrize(
    "case",
    [
        kernel_cases.Case((4, 3, 11, 13), residual="contiguous", activation="relu"),
        pool_cases.PoolCase((2, 5, 7, 9)),
        row_cases.Case((7, 24), running=torch.float32, vectors="bias+input_bias"),
        row_cases.Case((5, 40), residual="odd"),
        group_kernel_cases.Case((2, 4, 3, 5), 2),
    ],
    ids=case_id,
)
def test_results_are_the_same_without_gradients(case):
    cases = sys.modules[type(case).__module__]
    with torch.no_grad():
        bare = cases.run(dataclasses.replace(case, needs=()), cases.make(case), "triton")
    full = cases.run(case, cases.make(case), "triton")
    assert_same_bits(bare, {name: full[name] for name in bare})


# What is saved for the backward.


@pytest.mark.parametrize(
    ("activation", "residual", "bits"),
    [("relu", None, 0), (None, "contiguous", 0), ("relu", "contiguous", 1)],
)
@pytest.mark.parametrize("shape", [(64, 16), (8, 8, 4, 8), (4, 3, 16, 16)], ids=str)
def test_batch_norm_saves_its_input_and_for_relu_with_a_residual_one_bit_per_value(
    shape, activation, residual, bits
):
    case = kernel_cases.Case(
        shape, residual=residual, activation=activation, running=False
    )
    tensors = kernel_cases.make(case)
    vectors = 4 * (2 + 2) * shape[1]  # weight, bias, mean, rstd
    saved = saved_bytes(lambda: kernel_cases.run(case, tensors, "triton"))
    assert saved == tensors.x.nbytes + vectors + bits * tensors.x.numel() // 8


@pytest.mark.parametrize("residual", [None, "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layer_norm_saves_the_tensor_that_it_normalises_and_two_numbers_per_row(
    dtype, residual
):
    vectors = "weight+bias" if residual else "weight+bias+input_bias"
    case = row_cases.Case((32, 24), dtype, residual=residual, vectors=vectors)
    tensors = row_cases.make(case)
    saved = saved_bytes(lambda: row_cases.run(case, tensors, "triton"))
    assert saved == (32 + vectors.count("+") + 1) * 24 * dtype.itemsize + 2 * 32 * 4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_fused_activation_is_not_saved_and_a_residual_costs_one_bit_per_value(
    memory_format,
):
    torch.manual_seed(0)
    x = torch.randn(4, 64, 8, 8).to(memory_format=memory_format).requires_grad_()
    vectors = 4 * 64 * 4

    def kept(model):
        return saved_bytes(lambda: model(x), besides=model.parameters())

    single = swap(nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()), backend="triton")
    assert kept(single) >= 2 * x.nbytes
    assert kept(fuse(single)) <= x.nbytes + vectors
    block = fuse(swap(Block(64).to(memory_format=memory_format), backend="triton"))
    # The inputs of convolutions and norms, and the signs after the addition.
    assert kept(block) <= 4 * x.nbytes + x.numel() // 8 + 2 * vectors
    assert kept(unfuse(block)) >= 5 * x.nbytes


# The operators that compilers see.


@pytest.mark.parametrize(("cases", "case"), OPERATORS, ids=case_id)
def test_the_operators_pass_opcheck(cases, case):
    # Compiling takes most of the time, so only every second case is compiled.
    routes.check_operators(cases, case, "cpu", compiles=case in cases.OPERATOR_CASES[::2])


@pytest.mark.parametrize(("cases", "case"), OPERATORS, ids=case_id)
def test_the_operators_give_the_same_bits_as_eager_calls(cases, case, monkeypatch):
    if cases is row_cases:
        case = dataclasses.replace(case, running=torch.float32)
    eager = cases.run(case, cases.make(case), "triton")
    routes.use_operators(monkeypatch)
    operator = cases.run(case, cases.make(case), "triton")
    if cases is not row_cases:  # whose operators update the running statistics themselves
        for name in {"running_mean", "running_var"} & eager.keys():
            torch.testing.assert_close(operator.pop(name), eager.pop(name))
    assert_same_bits(operator, eager)


def test_channels_without_variance_have_no_negative_one(monkeypatch):
    routes.use_operators(monkeypatch)
    running = (torch.zeros(6), torch.ones(6))
    functional.batch_norm(
        torch.ones(4, 6), *running, training=True, momentum=1, backend="triton"
    )
    assert running[1].min() >= 0


def batch_norm_in_eval(x):
    mean, var = torch.zeros(6), torch.ones(6)
    return functional.batch_norm(x, mean, var, activation="relu", backend="triton")


@pytest.mark.parametrize(
    "norm", [batch_norm, batch_norm_in_eval, layer_norm, add_layer_norm]
)
def test_make_fx_records_the_kernels_as_one_operator(norm):
    graph = make_fx(lambda x: norm(x))(X)
    targets = [node.target for node in graph.graph.nodes]
    operator = f"{norm.__name__.removesuffix('_in_eval')}_forward"
    assert targets.count(getattr(torch.ops.normplug, operator).default) == 1
    assert torch.equal(graph(X + X**2), norm(X + X**2))


@pytest.mark.parametrize(
    ("cases", "arguments"),
    [
        (kernel_cases, ((6, 5), "contiguous", None)),
        (kernel_cases, ((2, 3, 11, 13), "contiguous", "relu")),
        (row_cases, (False, "permuted")),
        (row_cases, (True, "contiguous", normplug.RMSNorm)),
        (pool_cases, ()),
    ],
    ids=case_id,
)
def test_one_compiled_graph_serves_other_numbers_of_rows(cases, arguments):
    cases.check_compiled(*arguments, "cpu", "aot_eager")


class Projected(nn.Module):
    """A LayerNorm between linear layers, with the operation before it that `before` names."""

    def __init__(self, before):
        super().__init__()
        self.norm, self.before = nn.LayerNorm(32), before
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = self.first(x)
        if self.before == "activation":
            h = h.tanh()
        elif self.before == "addition":
            h = x + h
        elif self.before == "scaled addition":
            h = x + 2 * h
        return self.last(self.norm(h)) + h


@pytest.mark.parametrize(
    ("before", "operators"),
    [
        (None, {"layer_norm_backward"}),
        ("addition", {"add_layer_norm_forward", "add_layer_norm_backward"}),
        ("activation", set()),
        ("scaled addition", set()),
    ],
)
def test_a_compiler_gets_operators_unless_it_can_fuse_what_makes_the_input(
    before, operators, monkeypatch
):
    routes.use_operators_for_small_inputs(monkeypatch)
    monkeypatch.setattr(can_run, "is_asked_for", lambda backend, x: True)
    graphs = []

    def look(graph, inputs):
        # A forward is wrapped, since it may update statistics.
        named = (
            str(a) for node in graph.graph.nodes for a in (node.target, *node.args[:1])
        )
        graphs.append({n.split(".")[1] for n in named if n.startswith("normplug.")})
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    model = normplug.swap(Projected(before))
    if "addition" in str(before):
        fuse(model)
    plain = copy.deepcopy(model)
    backend = aot_autograd(fw_compiler=look)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    x = torch.randn(6, 32)
    ours, theirs = outcome(compiled, x), outcome(plain, x)
    # Not compiled.
    ours |= {name: value for name, value in theirs.items() if "watched" in name}
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert set.union(*graphs) == operators


@pytest.mark.parametrize(
    ("layer", "shape", "memory_format", "operators"),
    [
        (nn.Conv2d, (2, 8, 6, 6), torch.contiguous_format, 0),
        (nn.Conv2d, (2, 8, 6, 6), torch.channels_last, 1),
        (nn.Conv3d, (2, 8, 4, 4, 4), torch.contiguous_format, 1),
        (nn.Conv3d, (2, 8, 4, 4, 4), torch.channels_last_3d, 1),
    ],
)
def test_a_compiler_gets_no_operator_for_images_that_it_lays_out_itself(
    layer, shape, memory_format, operators, monkeypatch
):
    routes.use_operators_for_small_inputs(monkeypatch)
    monkeypatch.setattr(can_run, "is_asked_for", lambda backend, x: True)
    found = []

    def look(graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes]
        found.append(sum(t.startswith("normplug.batch_norm_forward") for t in targets))
        return make_boxed_func(graph.forward)

    norm = nn.BatchNorm2d(8) if layer is nn.Conv2d else nn.BatchNorm3d(8)
    model = nn.Sequential(layer(8, 8, 1), norm, nn.ReLU()).to(memory_format=memory_format)
    compiled = torch.compile(
        fuse(swap(model)), backend=aot_autograd(fw_compiler=look), fullgraph=True
    )
    compiled(torch.randn(shape).to(memory_format=memory_format)).sum().backward()
    assert sum(found) == operators


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_fused_norm_adds_the_bias_of_the_convolution_before_it(memory_format, compiler):
    torch.manual_seed(0)
    stock = Depthwise()
    nn.init.normal_(stock.conv.bias, 1, 2)
    x = torch.randn(2, 8, 5, 6).to(memory_format=memory_format)
    results = []
    for backend, dtype in (
        ("triton", torch.float32),
        ("torch", torch.float32),
        ("torch", None),
    ):
        model = swap(copy.deepcopy(stock), backend=backend, track_running_stats=True)
        model.to(dtype or torch.float64)
        run = fuse(model) if backend == "triton" else model
        if backend == "triton" and compiler:
            run = torch.compile(model, backend=compiler, fullgraph=True)
        y = run(x.to(dtype or torch.float64))
        gradients = torch.autograd.grad(y.sigmoid().square().sum(), [*model.parameters()])
        named = zip(dict(model.named_parameters()), gradients, strict=True)
        results.append(
            {"y": y.detach(), **dict(named), "watched_var": model.norm.watched_var}
        )
    ours, theirs, truth = results
    for name, value in ours.items():
        assert_no_worse(name, value, theirs[name], truth[name], spare=1e-6)


# How a call runs.


def test_the_log_names_the_plan_and_the_kernels_of_a_new_call(monkeypatch, caplog):
    routes.forget(monkeypatch)
    caplog.set_level("DEBUG", "normplug")
    layer_norm(X)
    functional.layer_norm(X.view(2, 2, 6)[..., ::2], (3,), backend="triton")
    plain, copied = [message for message in caplog.messages if "LayerNormPlan" in message]
    kernel = "layer_norm_rows_forward with num_warps="
    assert f"layer_norm of (4, 6): LayerNormPlan, {kernel}" in plain
    assert f"LayerNormPlan, copies to a layout that the kernels read, {kernel}" in copied
    assert ", launched by " in plain


@pytest.mark.parametrize("pool", [None, routes.Pool((2, 2), (2, 2), (0, 0), False)])
def test_a_stored_call_keeps_no_tensor_alive(pool, monkeypatch):
    routes.forget(monkeypatch)
    x = torch.randn(2, 3, 4, 10)[..., ::2]  # the kernels read a copy of it
    for _ in range(2):
        batch_norm(x) if pool is None else routes.batch_norm(x, pool=pool)
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
    assert [each is x for each in tensors if each.shape == x.shape] == [True]


def gated(x, weight):
    gate = torch.tanh(x) * weight
    return functional.rms_norm(x * 2, (6,), weight, backend="triton", gate=gate)


@pytest.mark.parametrize("norm", [batch_norm, layer_norm, add_layer_norm, gated])
def test_derivatives_of_a_weight_that_an_earlier_norm_has_too(norm):
    leaves = torch.randn(4, 6).double().requires_grad_(), (1 + torch.rand(6)).double()
    leaves[1].requires_grad_()
    dy = torch.randn(4, 6).double()

    def derivatives(**how):
        x, weight = leaves
        y = norm(torch.tanh(norm(x, weight)), weight)
        return torch.autograd.grad(y, leaves, dy, **how)

    for one, two in zip(derivatives(), derivatives(create_graph=True), strict=True):
        torch.testing.assert_close(one, two)
