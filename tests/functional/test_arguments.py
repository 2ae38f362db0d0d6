"""Invalid arguments to public functions and classes raise errors with the rule and the value."""

import contextlib
import copy
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from normplug import functional, modes

np = pytest.importorskip("numpy")
pytest.importorskip("lightning.pytorch")
from normplug.lightning import SwapNorms, VarianceLogger  # noqa: E402

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
ARRAY = X.numpy()
ON_META = torch.ones(6, device="meta")
MEAN, VAR = torch.zeros(6), torch.ones(6)
NO_STATISTICS = {"running_mean": None, "running_var": None}
batch_norm = partial(functional.batch_norm, input=X, training=True, **NO_STATISTICS)
layer_norm = partial(functional.layer_norm, input=X, normalized_shape=(6,))
add_layer_norm = partial(functional.add_layer_norm, x=X, residual=X, normalized_shape=(6,))
rms_norm = partial(functional.rms_norm, input=X, normalized_shape=(6,))
add_rms_norm = partial(functional.add_rms_norm, x=X, residual=X, normalized_shape=(6,))
group_norm = partial(functional.group_norm, input=X, num_groups=2)
instance_norm = partial(functional.instance_norm, input=X[None])
make_group_norm = partial(normplug.GroupNorm, num_groups=2, num_channels=6)
make_instance_norm = partial(normplug.InstanceNorm2d, num_features=6)
make_layer_norm = partial(normplug.LayerNorm, normalized_shape=6)
make_rms_norm = partial(normplug.RMSNorm, normalized_shape=6)
EPS_MAY_BE_NONE = (rms_norm, add_rms_norm, make_rms_norm)


def model():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6))


def on_model(call):
    return lambda **options: call(model(), **options)


def on_swapped_model(call):
    return lambda **options: call(normplug.swap(model()), **options)


def swapped(**options):
    with normplug.swapped(model(), **options):
        pass


swap, plan = on_model(normplug.swap), on_model(normplug.plan)
set_mode, fuse = on_swapped_model(normplug.set_mode), on_swapped_model(normplug.fuse)
unswap = on_swapped_model(normplug.unswap)
BAD_TENSORS = [ARRAY, [1.0], 1.0, "x", 3]
BAD_NUMBERS = ["x", True, Fraction(1, 2), 1j, [1.0], ARRAY]
BAD_NUMBERS += [torch.tensor([0.5]), torch.tensor(True), torch.tensor(0.5, requires_grad=True)]
BAD_FLAGS = ["yes", 1, 0.0, None, torch.tensor(True), np.ones(2)]
BAD_CHOICES = [v for v in BAD_FLAGS if v is not None]  # None is the class's default
BAD_NAMES = [3, None, ["torch"], np.array(["torch", "auto"]), torch.ones(2), b"torch", True]
BAD_SIZES = [0, -1]
BAD_PAIRS = [("relu", 0.1), ("leaky_relu",), ("leaky_relu", -1.0), ("leaky_relu", float("inf"))]
BAD_COUNTS = [1.5, True, "a", None, [1], 1j, torch.tensor(3), float("nan")]
TOO_LARGE = [10**400, -(10**5000)]
BEYOND = [2**63, 10**5000]  # what no size can be
FLOAT8 = X.to(torch.float8_e4m3fn)
NOT_DENSE = [FLOAT8, X.to_sparse(), X.to_mkldnn()]
TABLE = []


def cases(call, caller, name, values, error):
    for v in values:
        shown = getattr(v, "__name__", modes.shown(v))  # a method shows its address
        case = f"{caller}-{name}-{shown:.20}"
        TABLE.append(pytest.param(call, {name: v}, error, caller, name, id=case))


def number_cases(call, caller):
    """Add cases for momentum, eps and backend, which functions and layers share."""
    cases(call, caller, "momentum", BAD_NUMBERS, TypeError)
    none = [] if call in EPS_MAY_BE_NONE else [None]
    cases(call, caller, "eps", [*none, *BAD_NUMBERS], TypeError)
    cases(call, caller, "momentum", TOO_LARGE, ValueError)
    cases(call, caller, "eps", TOO_LARGE, ValueError)
    cases(call, caller, "backend", BAD_NAMES, ValueError)


for call in (batch_norm, layer_norm, add_layer_norm, rms_norm, add_rms_norm):
    caller = f"functional.{call.func.__name__}"
    number_cases(call, caller)
    first = "x" if call in (add_layer_norm, add_rms_norm) else "input"
    for value in [None, *BAD_TENSORS, X.int(), X.bool(), X.to(torch.complex64)]:
        TABLE.append(pytest.param(call, {first: value}, TypeError, caller, "input"))
    vectors = ["weight", "running_var", "num_batches_tracked"]
    if call in EPS_MAY_BE_NONE:
        cases(call, caller, "weight_offset", [None, *BAD_NUMBERS], TypeError)
    else:
        vectors += ["bias", "running_mean"]
    vectors += {batch_norm: ["residual"], layer_norm: ["input_bias"]}.get(call, [])
    for name in vectors:
        cases(call, caller, name, BAD_TENSORS, TypeError)
        cases(call, caller, name, [ON_META], ValueError)
        if name != "num_batches_tracked":
            cases(call, caller, name, NOT_DENSE, TypeError)
        if name != "num_batches_tracked":
            cases(call, caller, name, [torch.ones(6).int(), torch.ones(6) * 1j], TypeError)
    cases(call, caller, "momentum", [float("nan"), float("inf")], ValueError)
    cases(call, caller, "backend", ["cuda"], ValueError)
    if call is not batch_norm:
        cases(call, caller, "autocast_output", [*BAD_NAMES, "half"], ValueError)
        shapes = [(6.0,), [True], ("6",), 6, None, 6.0, "6", (None,), torch.tensor([6])]
        cases(call, caller, "normalized_shape", shapes, TypeError)
        cases(call, caller, "normalized_shape", [(0,), (-6,), [], (5,)], ValueError)
for call in (group_norm, instance_norm):
    caller = f"functional.{call.func.__name__}"
    cases(call, caller, "input", [None, ARRAY, X.int()], TypeError)
    cases(call, caller, "eps", ["x", True], TypeError)
    cases(call, caller, "eps", TOO_LARGE, ValueError)
    for name in ("weight", "bias"):
        cases(call, caller, name, [ARRAY, 3], TypeError)
        cases(call, caller, name, [torch.ones(2)], ValueError)
    for name in ("backend", "activation"):
        cases(call, caller, name, [3, "tanh"], ValueError)
cases(group_norm, "functional.group_norm", "num_groups", [1.5, True, None], TypeError)
cases(group_norm, "functional.group_norm", "num_groups", [*BAD_SIZES, *BEYOND, 4], ValueError)
cases(group_norm, "functional.group_norm", "autocast_output", [None, "half"], ValueError)
cases(instance_norm, "functional.instance_norm", "use_input_stats", [1, None], TypeError)
cases(instance_norm, "functional.instance_norm", "momentum", ["x", True], TypeError)
updating = partial(instance_norm, running_mean=MEAN[:4], running_var=VAR[:4])
cases(updating, "functional.instance_norm", "momentum", [None], TypeError)
cases(make_group_norm, "GroupNorm", "num_groups", [1.5, None], TypeError)
cases(make_group_norm, "GroupNorm", "num_groups", BEYOND, ValueError)
cases(make_group_norm, "GroupNorm", "num_channels", [0, -6, *BEYOND], ValueError)
cases(make_group_norm, "GroupNorm", "track_running_stats", [1, "x"], TypeError)
cases(make_group_norm, "GroupNorm", "autocast_output", ["half"], ValueError)
cases(make_instance_norm, "InstanceNorm2d", "num_features", [1.5, None], TypeError)
cases(make_instance_norm, "InstanceNorm2d", "eps", TOO_LARGE, ValueError)
cases(batch_norm, "functional.batch_norm", "training", BAD_FLAGS, TypeError)
cases(batch_norm, "functional.batch_norm", "num_batches_tracked", [torch.arange(3)], ValueError)
cases(
    batch_norm, "functional.batch_norm", "activation", [3, ["relu"], "tanh", *BAD_PAIRS], ValueError
)
cases(add_layer_norm, "functional.add_layer_norm", "residual", [X[:2], X[0]], ValueError)
cases(add_rms_norm, "functional.add_rms_norm", "residual", [X[:2], X[0]], ValueError)
cases(batch_norm, "functional.batch_norm", "residual", [X[:1]], ValueError)
for name in ("running_mean", "running_var"):
    both = {"running_mean": torch.ones(()), "running_var": torch.ones(()), name: torch.ones(6)}
    TABLE.append(pytest.param(layer_norm, both, ValueError, "functional.layer_norm", name))
caller = "functional.channel_stats"
for value in [None, *BAD_TENSORS, X.int()]:
    TABLE.append(pytest.param(functional.channel_stats, {"x": value}, TypeError, caller, "input"))
for caller in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"):
    make = partial(getattr(normplug, caller), num_features=6)
    number_cases(make, caller)
    cases(make, caller, "num_features", BAD_COUNTS, TypeError)
    cases(make, caller, "num_features", BAD_SIZES, ValueError)
    cases(make, caller, "affine", BAD_FLAGS, TypeError)
    cases(make, caller, "track_running_stats", BAD_FLAGS, TypeError)
BAD_SHAPES = [[1.0], *BAD_COUNTS[:4], {}.get]
for make, caller in ((make_layer_norm, "LayerNorm"), (make_rms_norm, "RMSNorm")):
    number_cases(make, caller)
    cases(make, caller, "normalized_shape", BAD_SHAPES, TypeError)
    cases(make, caller, "normalized_shape", [[0], [-1], 0, -3, *BEYOND], ValueError)
    cases(make, caller, "elementwise_affine", BAD_FLAGS, TypeError)
    cases(make, caller, "track_running_stats", BAD_CHOICES, TypeError)
    cases(make, caller, "autocast_output", BAD_NAMES, ValueError)
OPTIONS = [(swap, "swap"), (swapped, "swap"), (SwapNorms, "lightning.SwapNorms")]
for call, caller in OPTIONS:
    cases(call, caller, "sync", BAD_FLAGS, TypeError)
    for name in ("preserve_output", "track_running_stats"):
        cases(call, caller, name, BAD_CHOICES, TypeError)
    cases(call, caller, "backend", BAD_NAMES, ValueError)
    cases(call, caller, "autocast_output", BAD_NAMES, ValueError)
BAD_FILTERS = [3, [3], 1.5, True, ["norm", None], b"norm", ARRAY, X, {"norm": 1}, nn.LayerNorm(6)]
for call, _ in [*OPTIONS, (plan, "plan")]:
    for name in ("include", "exclude"):
        cases(call, "", name, BAD_FILTERS, TypeError)
BAD_MODES = [True, None, 0, -1, "gold", float("nan"), [1], ARRAY, torch.tensor(1.0), 1j]
TAKES_MODE = [swap, swapped, set_mode, SwapNorms, batch_norm, layer_norm, add_layer_norm]
TAKES_MODE += [rms_norm, add_rms_norm, group_norm, instance_norm, make_group_norm]
for call in [*TAKES_MODE, make_layer_norm, make_rms_norm]:
    cases(call, "", "mode", BAD_MODES, ValueError)
cases(plan, "plan", "sync", BAD_FLAGS, TypeError)
cases(fuse, "fuse", "recompute", BAD_FLAGS, TypeError)
cases(unswap, "unswap", "fold", BAD_FLAGS, TypeError)
caller = "lightning.VarianceLogger"
cases(VarianceLogger, caller, "every_n_steps", BAD_COUNTS, TypeError)
cases(VarianceLogger, caller, "every_n_steps", BAD_SIZES, ValueError)
cases(VarianceLogger, caller, "dirpath", [3, b"x", [], X], TypeError)


@pytest.mark.parametrize(("call", "arguments", "error", "caller", "name"), TABLE)
def test_an_invalid_argument_raises_an_error_with_the_rule(call, arguments, error, caller, name):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^normplug(\.{caller})?: .*{name}"
    ) as raised:
        call(**arguments)
    assert raised.type is error
    assert "; got " in str(raised.value) or "go together" in str(raised.value)


@pytest.mark.parametrize("value", [None, 3, "model", {}, nn.Linear, ARRAY, X])
@pytest.mark.parametrize(
    "name", ["swap", "unswap", "plan", "check", "fuse", "unfuse", "fusions", "set_mode", "swapped"]
)
def test_every_function_rejects_a_model_that_is_not_a_module(name, value):
    arguments = ("golden",) if name == "set_mode" else ()
    with (
        pytest.raises(TypeError, match=rf"^normplug\.{name}: model must be an nn.Module; got "),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(getattr(normplug, name)(value, *arguments))


@pytest.mark.parametrize("call", [SwapNorms, on_model(normplug.swapped)])
def test_an_unknown_option_is_rejected_before_anything_runs(call):
    with pytest.raises(TypeError, match="preserve_outputs"):
        call(preserve_outputs=True).__enter__()
    with pytest.raises(TypeError, match="model"):
        SwapNorms(model=nn.LayerNorm(6))


@pytest.mark.parametrize(
    ("arguments", "name"), [({}, "num_features"), ({"num_features": 3, "foo": 1}, "foo")]
)
def test_a_missing_or_unknown_argument_is_refused_by_the_class(arguments, name):
    with pytest.raises(TypeError, match=rf"^normplug\.BatchNorm2d: .* argument:? '{name}'\.$"):
        normplug.BatchNorm2d(**arguments)


@pytest.mark.parametrize("value", [None, *BAD_TENSORS])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_rejects_an_input_that_is_not_a_tensor(training, value):
    layer = normplug.LayerNorm(6).train(training)
    text = r"functional.layer_norm: input must be a torch.Tensor; got"
    with pytest.raises(TypeError, match=text):
        layer(value)
    assert layer.watched_count == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_weight_must_not_be_nested(layout):
    weight = torch.nested.nested_tensor([torch.ones(6), torch.ones(3)], layout=layout)
    with pytest.raises(TypeError, match="weight must be a dense tensor; got a nested tensor"):
        functional.layer_norm(X, (6,), weight)


@pytest.mark.parametrize("wrong", ["bad", None, float("nan"), -1.0, 0, 10**400, torch.ones(())])
@pytest.mark.parametrize("cls", [normplug.BatchNorm1d, normplug.LayerNorm, normplug.RMSNorm])
def test_a_layer_refuses_a_wrong_target_variance_and_keeps_its_own(cls, wrong):
    layer = cls(6, mode=0.5)
    with pytest.raises((TypeError, ValueError), match="mode must be 'golden' .* got "):
        layer.target_variance = wrong
    assert layer.target_variance == 0.5


def test_a_message_shows_the_start_of_a_long_value():
    for wrong in ({"mode": "x" * 10**5}, {"backend": "x" * 10**5}, {"activation": "x" * 10**5}):
        with pytest.raises(ValueError, match="got 'xxx") as raised:
            functional.batch_norm(X, None, None, training=True, **wrong)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("eps", [-0.5, -1e-8, 0, float("inf"), float("nan")])
@pytest.mark.parametrize("training", [True, False])
def test_any_eps_gives_the_result_of_torch(training, eps):
    x, vectors = X.double()[..., None], (MEAN.double(), VAR.double() * 4)
    pairs = [
        (functional.layer_norm(x, (6, 1), eps=eps, mode=1), F.layer_norm(x, (6, 1), eps=eps)),
        (functional.rms_norm(x, (6, 1), eps=eps, mode=1), F.rms_norm(x, (6, 1), eps=eps)),
    ]
    y = functional.batch_norm(x, *map(torch.clone, vectors), training=training, eps=eps, mode=1)
    mean, var = (x.mean(0), x.var(0, correction=0)) if training else (v[:, None] for v in vectors)
    pairs.append((y, (x - mean) / (var + eps).sqrt()))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def stock_batch_norm(x, mean, var, weight, bias, training=False, momentum=0.1, eps=1e-5):
    """`F.batch_norm`, which refuses an eps below 0 in newer versions."""
    return torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, False)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [None, -0.5])
def test_the_samples_of_torchs_own_tests_give_the_results_of_torch(name, eps):
    operators = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    (*_, operator) = (op for op in operators if op.name == f"nn.functional.{name}")
    for dtype in (torch.float32, torch.float64):
        for sample in operator.sample_inputs("cpu", dtype):
            if name == "batch_norm" and sample.input.dim() < 2:
                continue  # refused: see `_checks.channels`
            options = sample.kwargs if eps is None else sample.kwargs | {"eps": eps}
            stock = stock_batch_norm if name == "batch_norm" else getattr(F, name)
            calls = [(f, copy.deepcopy(sample)) for f in (stock, getattr(functional, name))]
            theirs, ours = (f(s.input, *s.args, **options) for f, s in calls)
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            statistics = (s.args for _, s in calls)
            torch.testing.assert_close(*statistics, equal_nan=True)


NUMBER = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("call", "stock"),
    [
        (partial(batch_norm, eps=NUMBER), partial(F.batch_norm, X, None, None, training=True)),
        (partial(layer_norm, eps=NUMBER), partial(F.layer_norm, X, (6,))),
        (partial(rms_norm, eps=NUMBER), partial(F.rms_norm, X, (6,))),
        (partial(group_norm, eps=NUMBER), partial(F.group_norm, X, 2)),
        (partial(instance_norm, eps=NUMBER), partial(F.instance_norm, X[None])),
    ],
)
def test_an_eps_may_be_a_tensor_of_no_dimensions(call, stock):
    torch.testing.assert_close(call(), stock(eps=0.5))


def test_a_momentum_may_be_a_tensor_of_no_dimensions():
    layers = [nn.BatchNorm1d(6, momentum=0.5), normplug.BatchNorm1d(6, momentum=NUMBER)]
    watched = [normplug.LayerNorm(6, momentum=m) for m in (0.5, NUMBER)]
    for pair in (layers, watched):
        for layer in pair:
            layer(X)
        torch.testing.assert_close(*(list(layer.buffers()) for layer in pair))
    mean, var = MEAN.clone(), VAR.clone()
    functional.batch_norm(X, mean, var, training=True, momentum=NUMBER)
    torch.testing.assert_close([mean, var], list(layers[0].buffers())[:2])


def test_numpy_scalars_iterators_and_other_equivalents_are_accepted():
    size, half = np.int64(6), np.float32(0.5)
    for eps in (1, half, np.float64(1e-5)):
        functional.layer_norm(X, [size], eps=eps, momentum=half)
        functional.batch_norm(X, MEAN.clone(), VAR.clone(), training=True, eps=eps, momentum=half)
    functional.layer_norm(X, X.shape[1:], eps=0)
    assert normplug.LayerNorm(size).normalized_shape == (6,)
    assert normplug.LayerNorm(torch.Size([6])).normalized_shape == (6,)
    assert normplug.BatchNorm1d(size, momentum=None, eps=half).num_features == 6
    VarianceLogger(np.int64(3), dirpath=None)
    SwapNorms("golden", include=iter(["1"]), exclude=(nn.BatchNorm1d,))
    assert len(list(normplug.plan(model(), include=iter(["1", "2"])))) == 2
    assert copy.copy(SwapNorms(np.float64(0.5))).mode.target_variance == 0.5
