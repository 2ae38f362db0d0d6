"""The C++ path gives the Python path's bits, and autograd treats it like torch's operators.

Triton interprets the kernels, so launches go back to Python.
"""

import copy
import gc
import os
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kernel_cases
import modulated_cases
import normplug
import pair_cases
import routes
import row_cases
from calls import case_id
from normplug import functional, native
from normplug._kernels.launch import Launch
from normplug._ops import call as calls
from normplug._ops import can_run, operators
from normplug._ops.batch_norm import _BATCH, _STATISTICS
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from normplug.modules.probe import Probe, averages
from operator_cases import OPERATORS
from pair_cases import pair
from programs import program
from routes import both_ways, is_cpp

pytestmark = pytest.mark.skipif(
    os.environ["NORMPLUG_NATIVE"] != "1", reason="needs NORMPLUG_NATIVE=1"
)
HOST_PATH = "C++"
Batch, Row = kernel_cases.Case, row_cases.Case
HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
IMAGES = (3, 4, 2, 5)
ADDED = {"residual": "contiguous"}
FULL = "weight+bias+input_bias"
CASES = [
    *OPERATORS,
    (kernel_cases, Batch((6, 5), momentum=None)),
    (kernel_cases, Batch((6, 5, 7), torch.float16, params=FLOAT, mode=4)),
    (
        kernel_cases,
        Batch(IMAGES, HALF, "channels_last", activation="relu", dy="expanded"),
    ),
    (kernel_cases, Batch(IMAGES, training=False, activation="relu6", **ADDED)),
    *((kernel_cases, Batch((6, 5), needs=(name,), **ADDED)) for name in row_cases.INPUTS),
    (kernel_cases, Batch((6, 5), needs=())),
    *((row_cases, Row((3, 2, 4, 6), layout=layout)) for layout in row_cases.LAYOUTS),
    (row_cases, Row((5, 12), torch.float16, params=FLOAT, running=FLOAT, tracked=False)),
    (row_cases, Row((5, 12), used=("y",), **ADDED)),
    (row_cases, Row((5, 12), used=("total",), needs=("x", "residual"), **ADDED)),
    *((row_cases, Row((5, 12), vectors=FULL, needs=(name,))) for name in FULL.split("+")),
    (row_cases, Row((5, 70), needs=())),
    # Two by two, since every second case also runs as operators.
    *((modulated_cases, case) for case in modulated_cases.EVERY for _ in range(2)),
    *((modulated_cases, case) for case in modulated_cases.NEEDS[::3]),
]
# The operators run the same plans, so half of the cases are enough for them.
IN_OPERATORS = [case for _, case in CASES[::2]]


@pytest.mark.parametrize(("cases", "case"), CASES, ids=case_id)
def test_both_paths_and_their_operators_give_the_same_bits(cases, case, monkeypatch):
    tensors = cases.make(case)
    both_ways(lambda: cases.run(case, tensors, "triton"))
    if case not in IN_OPERATORS:
        return
    monkeypatch.setattr(can_run, "is_compiling", lambda: True)
    monkeypatch.setattr(calls, "_stored", {})
    native.path.clear()
    both_ways(lambda: cases.run(case, tensors, "triton"))
    # Once stored, an operator needs no Python.
    monkeypatch.setattr(operators, "plan_of", None)
    cases.run(case, tensors, "triton")
    native.path.clear()


PAIRS = [
    pair(IMAGES, activation="relu", layout="channels_last", **kernel_cases.HALF),
    pair(IMAGES, {"momentum": None}, dtype=DOUBLE, dy="expanded"),
    pair((2, 3, 11, 13), activation="silu", affine="", running=False),
    pair((6, 5), {"needs": ()}, activation="relu", layout="strided", needs=("bias",)),
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_both_paths_give_two_norms_in_one_call_the_same_bits(case):
    tensors = pair_cases.make(case)
    both_ways(lambda: pair_cases.run(case, tensors, "triton"))


def test_scales_and_shifts_that_lie_differently_are_copied():
    options = {"outer": (2,), "vectors": "scale+shift", "centred": True}
    case = modulated_cases.Case((2, 5, 24), **options)
    tensors = modulated_cases.make(case)
    tensors["shift"] = tensors["shift"].contiguous()
    both_ways(lambda: modulated_cases.run(case, tensors, "triton"))


@pytest.mark.parametrize(
    ("cases", "case"),
    [
        (kernel_cases, Batch((3, 4, 2, 2), activation="silu", residual="contiguous")),
        (row_cases, Row((5, 12), residual="contiguous", running=FLOAT)),
        (row_cases, Row((5, 12), HALF, residual="apart")),
    ],
    ids=case_id,
)
def test_a_node_recomputes_its_output(cases, case):
    cases.check_recomputed(case)
    with native.python_way():
        cases.check_recomputed(case)


# Norms as functions of the tensors that need gradients.

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
WEIGHT, BIAS = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)


def leaves(dtype=FLOAT):
    """x, weight, bias and residual."""
    found = (X, WEIGHT, BIAS, X.flip(0) * 0.5)
    return [t.to(dtype, copy=True).requires_grad_() for t in found]


def batch_norm(x, weight, bias, residual, **options):
    return functional.batch_norm(
        x, None, None, weight, bias, training=True, residual=residual, activation="silu",
        backend="triton", **options,
    )  # fmt: skip


def layer_norm(x, weight, bias, residual):
    options = {"input_bias": residual.sum(0), "backend": "triton"}
    return functional.layer_norm(x, (6,), weight, bias, **options)


def add_layer_norm(x, weight, bias, residual):
    y, total = functional.add_layer_norm(
        x, residual, (6,), weight, bias, backend="triton"
    )
    return torch.cat([y, total])


def normed(x, weight, bias, residual):
    """Only y, so that its grad_fn is the norm's."""
    return functional.add_layer_norm(x, residual, (6,), weight, bias, backend="triton")[0]


NORMS = pytest.mark.parametrize("norm", [batch_norm, layer_norm, add_layer_norm])
# Their outputs' grad_fn is the norm's.
ENDS = pytest.mark.parametrize("norm", [batch_norm, layer_norm, normed])


def named(tensors):
    return {str(i): t for i, t in enumerate(tensors)}


@ENDS
def test_the_node_is_written_in_cpp(norm):
    y = norm(*leaves())
    assert native.host_path().way == "C++"
    assert is_cpp(y)
    assert y.grad_fn is y.grad_fn
    assert not y.is_leaf
    with native.python_way():
        assert not is_cpp(norm(*leaves()))


# Hooks, checkpoints and what the node saves.


@NORMS
def test_hooks_see_the_saved_tensors_in_the_same_order_and_what_they_return_is_used(norm):
    def compute():
        seen = []

        def pack(t):
            seen.append(t.detach().clone())
            return len(seen) - 1, t * 2

        def unpack(kept):
            seen.append(torch.tensor(kept[0]))
            return kept[1]

        given = leaves()
        with saved_tensors_hooks(pack, unpack):
            y = norm(*given)
        return named([*torch.autograd.grad(y.square().sum(), given), *seen])

    assert len(both_ways(compute)) >= 10


@NORMS
def test_errors_of_hooks_propagate_and_hooks_may_be_disabled(norm):
    def fail(t):
        raise KeyError("lost")

    with saved_tensors_hooks(fail, fail), pytest.raises(KeyError, match="lost"):
        norm(*leaves())
    with saved_tensors_hooks(lambda t: t, fail):
        y = norm(*leaves())
    with pytest.raises(KeyError, match="lost"):
        y.sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        norm(*leaves()).sum().backward()


@NORMS
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "on the CPU"])
def test_checkpoints_give_the_same_bits(norm, how):
    def compute():
        given = leaves()
        if how == "on the CPU":
            with save_on_cpu():
                y = norm(*given)
        else:
            y = checkpoint(norm, *given, use_reentrant=how == "reentrant")
        y.square().sum().backward()
        return {"y": y, **named([t.grad for t in given])}

    both_ways(compute)


def test_nothing_is_kept_alive_once_the_outputs_are_gone():
    x, weight, bias, residual = leaves()
    y, total = functional.add_layer_norm(
        x, residual, (6,), weight, bias, backend="triton"
    )
    y.sum().backward(retain_graph=True)
    kept = [StorageWeakRef(t.untyped_storage()) for t in (y, total)]
    del y, total  # the node saves its own output total
    gc.collect()  # Triton's interpreter leaves cycles behind
    assert all(storage.expired() for storage in kept)


# Derivatives.


@NORMS
def test_second_derivatives_are_right_and_give_the_same_bits(norm):
    given = leaves(DOUBLE)
    assert torch.autograd.gradcheck(norm, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(norm, given, fast_mode=True)

    def compute():
        given = leaves()
        once = torch.autograd.grad(norm(*given).square().sum(), given, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in once), given)
        return named([*once, *twice])

    both_ways(compute)


@NORMS
def test_a_retained_graph_allows_one_more_backward(norm):
    def compute():
        given = leaves()
        y = norm(*given).square().sum()
        first = torch.autograd.grad(y, given, retain_graph=True)
        second = torch.autograd.grad(y, given)
        with pytest.raises(
            RuntimeError, match="backward through the graph a second time"
        ):
            torch.autograd.grad(y, given)
        return named([*first, *second])

    both_ways(compute)


# What happens between forward and backward.


@ENDS
def test_inputs_modified_in_place_are_detected(norm):
    def compute():
        detected = []
        for place in range(4):
            given = leaves()
            y = norm(*given)
            with torch.no_grad():
                given[place].mul_(2)
            try:
                y.sum().backward()
            except RuntimeError as error:
                detected += [place] * ("modified by an inplace operation" in str(error))
        return {"detected": detected}

    expected = {batch_norm: [0, 1, 2, 3], layer_norm: [0, 1, 2], normed: [1, 2]}
    assert both_ways(compute)["detected"] == expected[norm]


def test_the_versions_of_running_statistics_rise_in_training_only():
    def compute():
        norm = normplug.BatchNorm1d(6, backend="triton")
        rows = normplug.LayerNorm(6, backend="triton")
        for layer in (
            norm,
            rows,
            normplug.RMSNorm(6, backend="triton", track_running_stats=True),
        ):
            for training in (True, False):
                before = {n: b._version for n, b in layer.named_buffers()}
                layer.train(training)(X.clone().requires_grad_()).sum().backward()
                with torch.no_grad():
                    layer(X)
                for name, buffer in layer.named_buffers():
                    assert (buffer._version > before[name]) == training, name
        return {**norm.state_dict(), **{f"row {n}": b for n, b in rows.named_buffers()}}

    both_ways(compute)


@ENDS
def test_hooks_on_the_output_and_its_node_run(norm):
    def compute():
        given = leaves()
        y = norm(*given)
        seen = []
        y.retain_grad()
        y.register_hook(lambda g: g * 2)
        y.grad_fn.register_prehook(lambda grads: seen.append(grads[0].clone()))
        y.grad_fn.register_hook(
            lambda to, of: seen.extend(g.clone() for g in to if g is not None)
        )
        y.square().sum().backward()
        assert len(seen) > 3
        return named([y.grad, *seen, *(t.grad for t in given)])

    both_ways(compute)


@ENDS
def test_anomaly_mode_shows_the_forward(norm):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            given = leaves()
            y = norm(*given)
            with pytest.raises(RuntimeError, match="nan values"):
                y.backward(torch.full_like(y, torch.nan))
    text = "".join(str(each.message) for each in shown)
    assert "Traceback of forward call that caused the error" in text
    assert "y = norm(*given)" in text


# Without gradients, and in other modes.


@NORMS
def test_no_grad_and_inference_mode_give_the_same_bits(norm):
    def compute():
        given = leaves()
        with torch.no_grad():
            plain = norm(*given)
        with torch.inference_mode():
            inferred = norm(*given)
        assert not plain.requires_grad
        assert inferred.is_inference()
        return {"plain": plain, "inferred": inferred.clone()}

    both_ways(compute)


def test_a_module_trains_after_inference_mode():
    def compute():
        norm = normplug.BatchNorm1d(6, backend="triton")
        with torch.inference_mode():
            norm(X)
        norm(X).square().sum().backward()
        return {**norm.state_dict(), "dweight": norm.weight.grad}

    both_ways(compute)


def test_inference_tensors_cannot_be_saved():
    with torch.inference_mode():
        x = X.clone()
    for way in (native.python_way, torch.enable_grad):
        with (
            way(),
            pytest.raises(RuntimeError, match="Inference tensors cannot be saved"),
        ):
            functional.layer_norm(x, (6,), leaves()[1], backend="triton")


@pytest.mark.parametrize("output", ["float32", "low"])
def test_autocast_gives_the_same_bits(output):
    def compute():
        given = leaves()
        with torch.autocast("cpu", HALF):
            x = given[0] @ torch.eye(6)
            options = {"autocast_output": output, "backend": "triton"}
            y = functional.layer_norm(x, (6,), *given[1:3], **options)
            z = batch_norm(x, *given[1:3], None)
        assert (y.dtype, z.dtype) == (FLOAT if output == "float32" else HALF, HALF)
        grads = torch.autograd.grad(y.float().square().sum() + z.float().sum(), given[:3])
        return {"y": y, "z": z, **named(grads)}

    both_ways(compute)


class ChangesNothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@NORMS
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_no_dispatch_mode_transform_or_trace_is_bypassed(norm):
    given = leaves()
    expected = norm(*given)
    with ChangesNothing():
        assert not is_cpp(norm(*given))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(partial(norm, weight=None, bias=None, residual=X))(
            torch.stack([X, X])
        )
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: norm(x, *given[1:]).sum())(X)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode"),
    ):
        norm(forward_ad.make_dual(X, X), *given[1:])
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(norm, tuple(given))
    routes.assert_same("y", norm(*given), expected)


def test_a_tensor_that_a_transform_left_behind_is_plain():
    left = []

    def leave(x):
        left.append(x)
        return x

    torch.func.grad(lambda x: leave(x).sum())(X)
    with torch.no_grad():
        both_ways(lambda: {"y": layer_norm(left[0], WEIGHT, BIAS, X)})


def test_functional_calls_and_copies_of_a_module_give_the_same_bits():
    layer = normplug.BatchNorm1d(6, backend="triton")
    layer(X).sum().backward()

    def compute():
        copied = copy.deepcopy(layer)
        y = copied(X)
        y.square().sum().backward()
        given = {"weight": WEIGHT.clone().requires_grad_(), "bias": BIAS}
        z = torch.func.functional_call(copied, given, (X,))
        dweight = torch.autograd.grad(z.square().sum(), given["weight"])[0]
        return {
            "y": y,
            "z": z,
            "dweight": dweight,
            **copied.state_dict(),
            "d": copied.weight.grad,
        }

    both_ways(compute)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_errors_of_a_launch_propagate(when, monkeypatch):
    y = batch_norm(*leaves()) if when == "backward" else None

    def fail(*_):
        raise KeyError("no launch")

    monkeypatch.setattr(Launch, "__call__", fail)
    with pytest.raises(KeyError, match="no launch"):
        batch_norm(*leaves()) if y is None else y.sum().backward()
    monkeypatch.undo()
    batch_norm(*leaves()).sum().backward()


FORK = """
import os, torch
from normplug import functional, native

def step():
    x = torch.linspace(-1, 2, 24).view(4, 6).requires_grad_()
    y = functional.layer_norm(x, (6,), backend="triton")
    assert y.grad_fn.name() == "NormBackward"
    return (y, *torch.autograd.grad(y.square().sum(), x))

before = step()
child = os.fork()
if child == 0:
    same = all(torch.equal(a, b) for a, b in zip(step(), before))
    os._exit(0 if same and native.host_path().way == "C++" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_can_go_on():
    done = program(FORK)
    assert (done.returncode, done.stderr) == (0, "")


# The cache of calls.

SPEC = LayerNormSpec((6,), 0.1, 1e-5, 1.0, None, "float32")
ROWS = Tensors(X, None, WEIGHT, BIAS)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("dtype", [HALF, DOUBLE], ids=str)
def test_channel_statistics_give_the_same_bits(dtype, layout):
    x = kernel_cases.make(Batch(IMAGES, dtype, layout)).x
    both_ways(lambda: dict(zip(("mean", "var"), routes.channel_stats(x), strict=True)))
    found = native.path.run_call(_BATCH, _STATISTICS, Tensors(x))
    assert (found is None) == (layout == "strided")


@pytest.mark.parametrize(
    "layer",
    [
        normplug.BatchNorm2d(4, backend="triton"),
        normplug.LayerNorm(5, backend="triton"),
        normplug.RMSNorm(5, backend="triton"),
        normplug.GroupNorm(2, 4, backend="triton"),
        normplug.InstanceNorm2d(4, backend="triton"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_whose_calls_are_known_can_measure(layer):
    x = torch.randn(IMAGES)
    ys = [layer(x) for _ in range(3)]
    layer._probe = known = Probe()
    assert torch.equal(layer(x), ys[-1])
    del layer._probe
    assert torch.equal(layer(x), ys[-1])
    with native.python_way():
        layer._probe = Probe()
        layer(x)
    measured, expected = averages([known, layer._probe])
    assert torch.equal(measured, expected)
    assert measured[0] > 0


@pytest.fixture
def cached():
    """Only one call is stored."""
    native.start()
    native.path.clear()
    bound = calls.choose("test", ROWS, SPEC, "triton").run
    assert native.path.run_call(SPEC, "triton", ROWS) is None
    native.path.store_call(SPEC, "triton", ROWS, ROWS, bound)
    yield
    native.path.clear()


class Own(torch.Tensor):
    pass


OTHERS = {
    "eps": (SPEC._replace(eps=1e-3), "triton", ROWS),
    "shape of a row": (SPEC._replace(normalized_shape=(2, 3)), "triton", ROWS),
    "backend": (SPEC, "auto", ROWS),
    "shape": (SPEC, "triton", ROWS._replace(x=X[:3])),
    "strides": (SPEC, "triton", ROWS._replace(x=torch.cat([X, X], 1)[:, :6])),
    "dtype": (SPEC, "triton", ROWS._replace(x=X.double())),
    "dtype of a vector": (SPEC, "triton", ROWS._replace(bias=BIAS.double())),
    "no bias": (SPEC, "triton", ROWS._replace(bias=None)),
    "a residual": (SPEC, "triton", ROWS._replace(residual=X)),
    "input_bias instead of bias": (SPEC, "triton", Tensors(X, None, WEIGHT, None, BIAS)),
    "device": (SPEC, "triton", ROWS._replace(x=X.to("meta"))),
    "not hashable": (SPEC._replace(momentum=[]), "triton", ROWS),
    "a subclass": (SPEC, "triton", ROWS._replace(x=X.as_subclass(Own))),
    "sparse": (SPEC, "triton", ROWS._replace(x=X.to_sparse())),
    "negative": (SPEC, "triton", ROWS._replace(x=torch._neg_view(X))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_calls_are_not_found(what, cached):
    assert native.path.run_call(*OTHERS[what]) is None
    assert native.path.run_call(SPEC, "triton", ROWS) is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_not_found(layout, cached):
    nested = torch.nested.nested_tensor([X, X], layout=layout)
    assert native.path.run_call(SPEC, "triton", ROWS._replace(x=nested)) is None


def test_only_y_of_a_norm_in_cpp_can_be_recomputed():
    x, weight, bias, residual = leaves()
    y, total = functional.add_layer_norm(
        x, residual, (6,), weight, bias, backend="triton"
    )
    assert native.path.recomputable_node(y) is not None
    for other in (total, y + 1, x, X, None, 3):
        assert native.path.recomputable_node(other) is None
    with native.python_way():
        assert native.path.recomputable_node(y) is None
    node = native.path.recomputable_node(y)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        native.path.recompute(node)


# Calls of modules.

MAKERS = [
    partial(normplug.LayerNorm, 6),
    partial(normplug.LayerNorm, 6, elementwise_affine=False),
    partial(normplug.RMSNorm, 6),
    partial(normplug.RMSNorm, 6, track_running_stats=True),
    partial(normplug.GroupNorm, 2, 6),
    partial(normplug.BatchNorm1d, 6),
]


def is_stored(layer):
    others = {
        normplug.BatchNorm1d: (None, None, False, False),
        normplug.GroupNorm: (None,),
    }
    return (
        native.path.run_module(layer, X, None, None, *others.get(type(layer), ()))
        is not None
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("make", MAKERS)
def test_a_module_call_is_stored_for_layers_with_the_same_settings(make):
    layer = make(backend="triton")
    for _ in range(2):
        layer(X)
    assert is_stored(make(backend="triton"))
    for name, other in (("mode", 0.5), ("eps", 0.25), ("training", False)):
        before = getattr(layer, name)
        setattr(layer, name, other)
        assert not is_stored(layer), name
        setattr(layer, name, before)
    assert is_stored(layer)
    if layer.weight is not None:  # a computed weight is not in the module's table
        computed = nn.utils.weight_norm(layer)
        computed(X)
        assert not is_stored(computed)


class Handwritten(nn.Module):
    """A LayerNorm whose tensors have names of their own; the bias is a buffer."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(6))
        self.register_buffer("beta", torch.randn(6))

    def forward(self, x):
        return nn.functional.layer_norm(x, (6,), self.gamma, self.beta)


def test_a_module_call_reads_weight_and_bias_by_the_names_of_its_class():
    layer = normplug.swap(Handwritten(), backend="triton")

    def compute():
        y = layer(X)
        y.square().sum().backward()
        dgamma = layer.gamma.grad
        layer.gamma.grad = None
        return {"y": y, "dgamma": dgamma}

    expected = nn.functional.layer_norm(X, (6,), layer.gamma, layer.beta)
    torch.testing.assert_close(both_ways(compute)["y"], expected)
    assert is_stored(layer)
    with torch.no_grad():
        layer.beta += 1
    torch.testing.assert_close(layer(X), expected + 1)


class Gated(nn.Module):
    """An RMSNorm of pairs of values, after a gate."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x, gate=None):
        h = x.float() if gate is None else x.float() * nn.functional.silu(gate.float())
        h = h.unflatten(-1, (-1, 2))
        h = h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (self.scale.float() * h.flatten(-2)).to(x.dtype)


def test_a_module_call_reads_the_gate():
    stock = Gated()
    layer = normplug.swap(copy.deepcopy(stock), backend="triton")
    gate = torch.randn_like(X)

    def compute():
        return {"y": layer(X, gate), "without": layer(X)}

    ys = both_ways(compute)
    torch.testing.assert_close(ys["y"], stock(X, gate))
    torch.testing.assert_close(ys["without"], stock(X))


def test_a_module_call_with_a_tensor_among_its_settings_is_not_stored():
    layer, stock = normplug.BatchNorm1d(6, backend="triton"), nn.BatchNorm1d(6)
    for each in (layer, stock):
        each.eps, each.momentum = torch.tensor(0.5), torch.tensor(0.3)
    for step in range(4):
        torch.testing.assert_close(layer(X), stock(X))
        for each in (layer, stock):
            each.momentum.fill_(0.1 * step)
    torch.testing.assert_close(layer.running_var, stock.running_var)
