"""Invalid arguments to public functions and classes raise errors with the rule and the value."""

import contextlib
import copy
import reprlib
from fractions import Fraction
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from normplug import functional

np = pytest.importorskip("numpy")
pytest.importorskip("lightning.pytorch")
from normplug.lightning import SwapNorms, VarianceLogger

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
ARRAY = X.numpy()
MEAN, VAR = torch.zeros(6), torch.ones(6)
RUNNING = {"running_mean": MEAN, "running_var": VAR}
NUMBER = torch.tensor(0.5)


def model():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6))


def on_model(call):
    return lambda **options: call(model(), **options)


def on_swapped_model(call):
    return lambda **options: call(normplug.swap(model()), **options)


def swapped(**options):
    with normplug.swapped(model(), **options):
        pass


def named(prefix, calls):
    """Calls by the names with which their errors begin."""
    return {f"{prefix}{call.func.__name__}": call for call in calls}


batch_norm = partial(
    functional.batch_norm, input=X, training=True, running_mean=None, running_var=None
)
group_norm = partial(functional.group_norm, input=X, num_groups=2)
instance_norm = partial(functional.instance_norm, input=X[None])
layer_norm = partial(functional.layer_norm, input=X, normalized_shape=(6,))
rms_norm = partial(functional.rms_norm, input=X, normalized_shape=(6,))
two = {"x": X, "residual": X, "normalized_shape": (6,)}
add_layer_norm = partial(functional.add_layer_norm, **two)
add_rms_norm = partial(functional.add_rms_norm, **two)

CHANNELS = named("functional.", [batch_norm, group_norm, instance_norm])
CENTRED = named("functional.", [layer_norm])
RMS = named("functional.", [rms_norm])
ROWS = CENTRED | RMS
ADDING = named("functional.", [add_layer_norm, add_rms_norm])
COUNTED = named("functional.", [batch_norm]) | ROWS
FUNCTIONS = CHANNELS | ROWS
MEASURING = {"functional.channel_stats": functional.channel_stats}
BATCH_NORMS = named("", [partial(normplug.BatchNorm2d, num_features=6)])
SYNC_BATCH_NORM = named("", [partial(normplug.SyncBatchNorm, num_features=6)])
INSTANCE_NORM = named("", [partial(normplug.InstanceNorm2d, num_features=6)])
GROUP_NORM = named("", [partial(normplug.GroupNorm, num_groups=2, num_channels=6)])
LAYER_NORM = named("", [partial(normplug.LayerNorm, normalized_shape=6)])
ROW_LAYERS = LAYER_NORM | named("", [partial(normplug.RMSNorm, normalized_shape=6)])
LAYERS = BATCH_NORMS | ROW_LAYERS
SWAPS = {"swap": on_model(normplug.swap), "lightning.SwapNorms": SwapNorms}
PLAN = {"plan": on_model(normplug.plan)}
FUSE = {"fuse": on_swapped_model(normplug.fuse)}
UNSWAP = {"unswap": on_swapped_model(normplug.unswap)}
SET_MODE = {"set_mode": on_swapped_model(normplug.set_mode)}
LOGGER = {"lightning.VarianceLogger": VarianceLogger}

NOT_DENSE = [X.to_sparse(), X.to_mkldnn(), X.to(torch.float8_e4m3fn)]
ON_META = torch.ones(6, device="meta")
BAD_NUMBERS = ["x", True, Fraction(1, 2), 1j, [1.0], ARRAY]
BAD_NUMBERS += [torch.tensor([0.5]), torch.tensor(True), NUMBER.clone().requires_grad_()]
BAD_FLAGS = ["yes", 1, 0.0, torch.tensor(True), np.ones(2)]
BAD_NAMES = ["cuda", 3, None, ["torch"], b"torch", True, torch.ones(2)]
BAD_NAMES += [np.array(["torch", "auto"])]
BAD_PAIRS = [("relu", 0.1), ("leaky_relu",), ("leaky_relu", -1.0)]
BAD_PAIRS += [("leaky_relu", float("inf"))]
BAD_COUNTS = [1.5, True, "a", None, [1], 1j, torch.tensor(3), float("nan")]
BAD_ROWS = [(6.0,), [True], ("6",), 6, None, "6", (None,), torch.tensor([6])]
BAD_MODES = ["gold", True, None, 0, -1, float("nan"), [1], ARRAY, torch.tensor(1.0), 1j]
BAD_MODES += [nn.Parameter(torch.ones(())), 10**400]
BAD_FILTERS = [3, [3], 1.5, True, ["norm", None], b"norm", ARRAY, X, {"norm": 1}]
BAD_FILTERS += [nn.LayerNorm(6)]

# Callers, an argument, the error, and wrong values. A rule is one function of `_checks`: the first
# caller gets every value, and each other caller the first value, which shows that it has the rule.
# One call of `_checks.tensors` or `devices` checks every tensor of a call, so callers after the
# first show it by their weight. Functions that add share all other checks with those that do not.
BATCH = named("functional.", [batch_norm])
UPDATING = {
    "functional.instance_norm": partial(
        instance_norm, running_mean=MEAN[:4], running_var=VAR[:4]
    )
}
WRITING = ROWS | ROW_LAYERS | GROUP_NORM | SWAPS
GATED = named("functional.", [rms_norm])
MODULATED = named("functional.", [layer_norm, rms_norm])
RULES = [
    (
        FUNCTIONS,
        "input",
        TypeError,
        [ARRAY, [1.0], None, X.int(), X.bool(), X.to(torch.complex64)],
    ),
    (ADDING | MEASURING, "x", TypeError, [ARRAY]),
    (FUNCTIONS, "weight", TypeError, [ARRAY, *NOT_DENSE]),
    (BATCH, "weight", ValueError, [ON_META]),
    (FUNCTIONS, "weight", ValueError, [torch.ones(2)]),
    (BATCH, "bias", TypeError, [ARRAY]),
    (CHANNELS | CENTRED, "bias", ValueError, [torch.ones(2)]),
    (BATCH, "running_mean", TypeError, [ARRAY]),
    (BATCH | CENTRED, "running_mean", ValueError, [torch.ones(2)]),
    (BATCH, "running_var", TypeError, [ARRAY]),
    (COUNTED, "running_var", ValueError, [torch.ones(2)]),
    (BATCH | ADDING, "residual", TypeError, [ARRAY]),
    (BATCH | ADDING, "residual", ValueError, [torch.ones(2)]),
    ({"functional.layer_norm": layer_norm}, "input_bias", TypeError, [ARRAY]),
    (BATCH, "num_batches_tracked", TypeError, [ARRAY]),
    (COUNTED, "num_batches_tracked", ValueError, [torch.arange(3), ON_META]),
    (FUNCTIONS | LAYERS, "eps", TypeError, BAD_NUMBERS),
    (CHANNELS | CENTRED | BATCH_NORMS | LAYER_NORM, "eps", TypeError, [None]),
    (COUNTED | LAYERS | UPDATING, "momentum", TypeError, ["x"]),
    (COUNTED | LAYERS, "momentum", ValueError, [float("nan"), float("inf")]),
    (UPDATING, "momentum", TypeError, [None]),
    (RMS, "weight_offset", TypeError, [None, True]),
    (GATED, "gate", TypeError, [ARRAY]),
    (GATED, "gate", ValueError, [ON_META, X[:1], X[0]]),
    (GATED, "gate_first", TypeError, ["yes"]),
    (GATED, "group_size", TypeError, [1.5, True]),
    (GATED, "group_size", ValueError, [0, -1, 4]),
    (MODULATED, "scale", TypeError, [ARRAY]),
    (MODULATED, "scale", ValueError, [X[:2], X[:, :3], X[None], X[0, :1]]),
    (MODULATED, "shift", TypeError, [ARRAY]),
    (BATCH, "training", TypeError, [*BAD_FLAGS, None]),
    (named("functional.", [instance_norm]), "use_input_stats", TypeError, [1, None]),
    (CHANNELS, "activation", ValueError, ["tanh", 3, ["relu"], *BAD_PAIRS]),
    (FUNCTIONS | LAYERS | SWAPS, "backend", ValueError, BAD_NAMES),
    (WRITING, "autocast_output", ValueError, ["half", None, True]),
    (ROWS, "normalized_shape", TypeError, BAD_ROWS),
    (ROWS, "normalized_shape", ValueError, [(5,), (0,), (-6,), []]),
    (ROW_LAYERS, "normalized_shape", TypeError, [[1.0], None, {}.get]),
    (ROW_LAYERS, "normalized_shape", ValueError, [0, [0], [-1], -3]),
    (named("functional.", [group_norm]) | GROUP_NORM, "num_groups", TypeError, [1.5]),
    (named("functional.", [group_norm]), "num_groups", ValueError, [0, -1, 4]),
    (GROUP_NORM, "num_channels", ValueError, [0]),
    (
        BATCH_NORMS | SYNC_BATCH_NORM | INSTANCE_NORM,
        "num_features",
        TypeError,
        BAD_COUNTS,
    ),
    (BATCH_NORMS, "num_features", ValueError, [0, -1]),
    (BATCH_NORMS, "affine", TypeError, ["yes"]),
    (BATCH_NORMS, "track_running_stats", TypeError, ["yes"]),
    (ROW_LAYERS, "elementwise_affine", TypeError, ["yes"]),
    (ROW_LAYERS | GROUP_NORM | SWAPS, "track_running_stats", TypeError, [1]),
    (SWAPS | PLAN, "sync", TypeError, [None]),
    (SWAPS, "preserve_output", TypeError, [1]),
    (SWAPS | PLAN, "include", TypeError, BAD_FILTERS),
    (SWAPS | PLAN, "exclude", TypeError, [3]),
    (
        SWAPS | SET_MODE | FUNCTIONS | GROUP_NORM | ROW_LAYERS,
        "mode",
        ValueError,
        BAD_MODES,
    ),
    (FUSE, "recompute", TypeError, [None]),
    (UNSWAP, "fold", TypeError, [None]),
    (LOGGER, "every_n_steps", TypeError, [1.5, None]),
    (LOGGER, "every_n_steps", ValueError, [0, -1]),
    (LOGGER, "dirpath", TypeError, [3, b"x", [], X]),
]


def cases():
    for callers, name, error, values in RULES:
        for place, (caller, call) in enumerate(callers.items()):
            for value in values if place == 0 else values[:1]:
                # A method shows its address.
                shown = getattr(value, "__name__", reprlib.repr(value))
                case = f"{caller}-{name}-{shown:.20}"
                yield pytest.param(caller, call, name, value, error, id=case)


@pytest.mark.parametrize(("caller", "call", "name", "value", "error"), [*cases()])
def test_an_invalid_argument_raises_an_error_with_the_rule(
    caller, call, name, value, error
):
    of_all = name in ("mode", "include", "exclude")
    start = "normplug: " if of_all else f"normplug.{caller}: "
    said = "input" if name == "x" else name
    with pytest.raises(error, match=rf"^{start}.*{said}.*(; got |go together)"):
        call(**{name: value})


WHY = "is on cpu" if find_spec("triton") else "triton is not installed"
REFUSED = (NotImplementedError, {"backend": "triton"}, f"{WHY}.*Use backend='auto'")
INVALID = [
    (batch_norm, TypeError, {"input": X.long()}, r"got torch.int64.*input.float\(\)"),
    (batch_norm, ValueError, {"input": X[0]}, r"\(N, C\).*shape \(6,\)"),
    (batch_norm, ValueError, {"input": X[:1]}, r"more than one value per .*\(1, 6\)"),
    (batch_norm, ValueError, {"weight": VAR[:4]}, r"must be \(C,\) = \(6,\).*got \(4,\)"),
    (batch_norm, ValueError, {"running_mean": MEAN}, "together; got only running_mean"),
    (batch_norm, ValueError, {"running_var": VAR}, "together; got only running_var"),
    (batch_norm, ValueError, {"training": False}, "training=False normalises by running"),
    (batch_norm, ValueError, {"backend": "cuda"}, "'auto', 'triton', 'torch'; got 'cuda'"),
    (batch_norm, ValueError, {**RUNNING, "momentum": None}, "num_batches_tracked to count"),
    (layer_norm, ValueError, {"normalized_shape": (5,)}, r"=\(5,\); got .* \(4, 6\)"),
    (layer_norm, ValueError, {"weight": VAR[:1]}, r"weight must be .* \(6,\); got \(1,\)"),
    (layer_norm, ValueError, {"running_mean": VAR, "running_var": VAR[0]}, "a scalar tensor"),
    (layer_norm, ValueError, {"input_bias": X}, "input_bias must be of shape"),
    (layer_norm, ValueError, {"scale": X[:3]}, r"\(B, 6\), \(B, 1, 6\) or .* \(3, 6\)"),
    (layer_norm, ValueError, {"scale": X, "shift": X[0]}, r"\(4, 6\); got \(6,\)"),
    (layer_norm, ValueError, {"scale": X, "weight": X}, "weight must be of shape"),
    (layer_norm, TypeError, {"scale": X, "weight": MEAN, "normalized_shape": 6}, "a sequence"),
    (rms_norm, ValueError, {"scale": X, "gate": X}, "cannot be combined with a gate"),
    (rms_norm, ValueError, {"scale": X, "group_size": 3}, "cannot be combined"),
    (rms_norm, ValueError, {"input": X[:, None], "normalized_shape": (1, 6), "group_size": 3},
     r"one size in normalized_shape=\(1, 6\); got 3"),
    (rms_norm, ValueError, {"running_var": VAR[0], "momentum": None}, "num_batches_tracked"),
    (group_norm, ValueError, {"num_groups": 4}, "must be a divisor of the 6 .* got 4"),
    (group_norm, ValueError, {"input": X[:1], "num_groups": 6}, "one value per group"),
    (instance_norm, ValueError, {"input": X}, "more than one spatial position"),
    *((call, *REFUSED) for call in (batch_norm, layer_norm, rms_norm, group_norm)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "options", "message"), INVALID)
def test_an_invalid_call_raises_an_error_with_the_rule_and_the_values(
    call, error, options, message
):
    name = call.func.__name__
    with pytest.raises(error, match=rf"normplug.functional.{name}: .*{message}"):
        call(**options)


ON_MODELS = [
    "swap",
    "unswap",
    "plan",
    "check",
    "fuse",
    "unfuse",
    "fusions",
    "set_mode",
    "swapped",
]


@pytest.mark.parametrize("name", ON_MODELS)
def test_every_function_rejects_a_model_that_is_not_a_module(name):
    arguments = ("golden",) if name == "set_mode" else ()
    text = rf"^normplug\.{name}: model must be an nn.Module; got "
    for wrong in [None, "model", {}, nn.Linear, X] if name == "swap" else [None]:
        with pytest.raises(TypeError, match=text), contextlib.ExitStack() as stack:
            stack.enter_context(getattr(normplug, name)(wrong, *arguments))


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
    with pytest.raises(
        TypeError, match=rf"^normplug\.BatchNorm2d: .* argument:? '{name}'\.$"
    ):
        normplug.BatchNorm2d(**arguments)


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_rejects_an_input_that_is_not_a_tensor(training):
    layer = normplug.LayerNorm(6).train(training)
    text = r"functional.layer_norm: input must be a torch.Tensor; got"
    with pytest.raises(TypeError, match=text):
        layer(None)
    assert layer.watched_count == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_weight_must_not_be_nested(layout):
    weight = torch.nested.nested_tensor([torch.ones(6), torch.ones(3)], layout=layout)
    with pytest.raises(
        TypeError, match="weight must be a dense tensor; got a nested tensor"
    ):
        functional.layer_norm(X, (6,), weight)


@pytest.mark.parametrize(
    "cls", [normplug.BatchNorm1d, normplug.LayerNorm, normplug.RMSNorm]
)
def test_a_layer_refuses_a_wrong_target_variance_and_keeps_its_own(cls):
    layer = cls(6, mode=0.5)
    for wrong in BAD_MODES:
        with pytest.raises(ValueError, match="mode must be 'golden' .* got "):
            layer.target_variance = wrong
        assert layer.target_variance == 0.5


@pytest.mark.parametrize(
    "name", ["mode", "target_variance", "backend", "autocast_output", "statistics"]
)
def test_a_setting_is_never_registered_as_a_parameter_or_a_module(name):
    layer = normplug.RMSNorm(6, mode=0.5)
    before = layer._normplug
    rule = "mode" if name == "target_variance" else name
    for wrong in (nn.Parameter(torch.ones(())), nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=f"{rule} must be .* got "):
            setattr(layer, name, wrong)
    assert layer._normplug == before
    assert list(layer._parameters) == ["weight"]
    assert not layer._modules


def test_an_eps_that_is_a_parameter_is_refused_by_the_next_call():
    layer = normplug.RMSNorm(6)
    layer.eps = nn.Parameter(torch.ones(()))
    with pytest.raises(TypeError, match="eps must be a number"):
        layer(X)


def test_a_message_shows_the_start_of_a_long_value():
    for name in ("mode", "backend", "activation"):
        with pytest.raises(ValueError, match="got 'xxx") as raised:
            batch_norm(**{name: "x" * 10**5})
        assert len(str(raised.value)) < 400


def stock_batch_norm(x, mean, var, weight, bias, training=False, momentum=0.1, eps=1e-5):
    """`F.batch_norm`, which refuses an eps below 0 in newer versions."""
    return torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, False)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [None, -0.5, 0, float("nan")])
def test_the_samples_of_torchs_own_tests_give_the_results_of_torch(name, eps):
    operators = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations"
    ).op_db
    (*_, operator) = (op for op in operators if op.name == f"nn.functional.{name}")
    for dtype in (torch.float32, torch.float64):
        for sample in operator.sample_inputs("cpu", dtype):
            if name == "batch_norm" and sample.input.dim() < 2:
                continue  # refused: see `_checks.channels`
            options = sample.kwargs if eps is None else sample.kwargs | {"eps": eps}
            stock = stock_batch_norm if name == "batch_norm" else getattr(F, name)
            calls = [
                (f, copy.deepcopy(sample)) for f in (stock, getattr(functional, name))
            ]
            theirs, ours = (f(s.input, *s.args, **options) for f, s in calls)
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            statistics = (s.args for _, s in calls)
            torch.testing.assert_close(*statistics, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS | ADDING)
def test_an_eps_may_be_a_tensor_of_no_dimensions(name):
    call = (FUNCTIONS | ADDING)[name]
    torch.testing.assert_close(call(eps=NUMBER), call(eps=0.5))


def test_a_momentum_may_be_a_tensor_of_no_dimensions():
    layers = [nn.BatchNorm1d(6, momentum=0.5), normplug.BatchNorm1d(6, momentum=NUMBER)]
    watched = [
        normplug.LayerNorm(6, track_running_stats=True, momentum=m) for m in (0.5, NUMBER)
    ]
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
        functional.batch_norm(
            X, MEAN.clone(), VAR.clone(), training=True, eps=eps, momentum=half
        )
    functional.layer_norm(X, X.shape[1:], eps=0)
    assert normplug.LayerNorm(size).normalized_shape == (6,)
    assert normplug.LayerNorm(torch.Size([6])).normalized_shape == (6,)
    assert normplug.BatchNorm1d(size, momentum=None, eps=half).num_features == 6
    VarianceLogger(np.int64(3), dirpath=None)
    SwapNorms("golden", include=iter(["1"]), exclude=(nn.BatchNorm1d,))
    assert len(list(normplug.plan(model(), include=iter(["1", "2"])))) == 2
    assert copy.copy(SwapNorms(np.float64(0.5))).mode.target_variance == 0.5
