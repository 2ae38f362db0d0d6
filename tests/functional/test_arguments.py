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
ON_META = torch.ones(6, device="meta")
MEAN, VAR = torch.zeros(6), torch.ones(6)
RUNNING = {"running_mean": MEAN, "running_var": VAR}
WHY = "is on cpu" if find_spec("triton") else "triton is not installed"


def model():
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6))


def on_model(call):
    return lambda **options: call(model(), **options)


def on_swapped_model(call):
    return lambda **options: call(normplug.swap(model()), **options)


def swapped(**options):
    with normplug.swapped(model(), **options):
        pass


batch_norm = partial(
    functional.batch_norm, input=X, training=True, running_mean=None, running_var=None
)
layer_norm = partial(functional.layer_norm, input=X, normalized_shape=(6,))
add_layer_norm = partial(
    functional.add_layer_norm, x=X, residual=X, normalized_shape=(6,)
)
rms_norm = partial(functional.rms_norm, input=X, normalized_shape=(6,))
add_rms_norm = partial(functional.add_rms_norm, x=X, residual=X, normalized_shape=(6,))
group_norm = partial(functional.group_norm, input=X, num_groups=2)
instance_norm = partial(functional.instance_norm, input=X[None])
ADDING = [add_layer_norm, add_rms_norm]
CENTRED, RMS = [layer_norm, add_layer_norm], [rms_norm, add_rms_norm]
ROWS, CHANNELS = [*CENTRED, *RMS], [batch_norm, group_norm, instance_norm]
FUNCTIONS = [*CHANNELS, *ROWS]
BATCH_NORMS = [normplug.BatchNorm1d, normplug.BatchNorm2d, normplug.BatchNorm3d]
BATCH_NORMS = [
    partial(each, num_features=6) for each in (*BATCH_NORMS, normplug.SyncBatchNorm)
]
make_instance_norm = partial(normplug.InstanceNorm2d, num_features=6)
make_group_norm = partial(normplug.GroupNorm, num_groups=2, num_channels=6)
make_layer_norm = partial(normplug.LayerNorm, normalized_shape=6)
make_rms_norm = partial(normplug.RMSNorm, normalized_shape=6)
ROW_LAYERS = [make_layer_norm, make_rms_norm]
LAYERS = [*BATCH_NORMS, *ROW_LAYERS]
swap, plan = on_model(normplug.swap), on_model(normplug.plan)
set_mode, fuse = on_swapped_model(normplug.set_mode), on_swapped_model(normplug.fuse)
unswap = on_swapped_model(normplug.unswap)
SWAPS = [swap, swapped, SwapNorms]
CALLERS = {swap: "swap", swapped: "swap", SwapNorms: "lightning.SwapNorms", plan: "plan"}
CALLERS |= {fuse: "fuse", unswap: "unswap", VarianceLogger: "lightning.VarianceLogger"}

# Wrong values, the plainest first.
BAD_TENSORS = [ARRAY, [1.0], 1.0, "x", 3]
NOT_REAL = [X.int(), X.bool(), X.to(torch.complex64)]
NOT_DENSE = [X.to_sparse(), X.to_mkldnn(), X.to(torch.float8_e4m3fn)]
TENSORS = [ARRAY, X.int(), X.to_sparse(), *BAD_TENSORS[1:], *NOT_REAL[1:], *NOT_DENSE[1:]]
INPUTS = [ARRAY, X.int(), None, *BAD_TENSORS[1:], *NOT_REAL[1:]]
ELSEWHERE = [ON_META, torch.ones(2)]
WITH_GRADIENT = torch.tensor(0.5, requires_grad=True)
BAD_NUMBERS = ["x", True, Fraction(1, 2), 1j, [1.0], ARRAY]
BAD_NUMBERS += [torch.tensor([0.5]), torch.tensor(True), WITH_GRADIENT]
NOT_FINITE = [float("nan"), float("inf")]
BAD_FLAGS = ["yes", 1, 0.0, None, torch.tensor(True), np.ones(2)]
BAD_CHOICES = [v for v in BAD_FLAGS if v is not None]  # None is the class's default
BAD_NAMES = ["cuda", 3, None, ["torch"], b"torch", True, torch.ones(2)]
BAD_NAMES += [np.array(["torch", "auto"])]
BAD_SIZES = [0, -1]
BAD_PAIRS = [("relu", 0.1), ("leaky_relu",), ("leaky_relu", -1.0)]
BAD_PAIRS += [("leaky_relu", float("inf"))]
BAD_COUNTS = [1.5, True, "a", None, [1], 1j, torch.tensor(3), float("nan")]
BAD_ROWS = [(6.0,), [True], ("6",), 6, None, 6.0, "6", (None,), torch.tensor([6])]
BAD_MODES = ["gold", True, None, 0, -1, float("nan"), [1], ARRAY, torch.tensor(1.0), 1j]
BAD_MODES += [nn.Parameter(torch.ones(())), 10**400]
BAD_FILTERS = [3, [3], 1.5, True, ["norm", None], b"norm", ARRAY, X, {"norm": 1}]
BAD_FILTERS += [nn.LayerNorm(6)]
TABLE = []


def caller_of(call):
    """The name that the errors of a call begin with; "" if it is not checked."""
    function = getattr(call, "func", call)
    if function in CALLERS:
        return CALLERS[function]
    if isinstance(function, type):
        return function.__name__
    is_function = getattr(function, "__module__", "") == functional.__name__
    return f"functional.{function.__name__}" if is_function else ""


def cases(calls, name, values, error, others=1):
    """Add a case for each value and the first call, and for the first `others` and each call.

    A rule is one function, which the first call shows whole; the rest show that they call it.
    """
    for place, call in enumerate(calls):
        for value in values if place == 0 else values[:others]:
            # A method shows its address.
            shown = getattr(value, "__name__", reprlib.repr(value))
            caller = "" if name in ("mode", "include", "exclude") else caller_of(call)
            said = "input" if name == "x" else name
            case = f"{caller}-{name}-{shown:.20}"
            TABLE.append(pytest.param(call, {name: value}, error, caller, said, id=case))


with_input = [batch_norm, layer_norm, rms_norm, group_norm, instance_norm]
cases(with_input, "input", INPUTS, TypeError, others=2)
cases([functional.channel_stats, *ADDING], "x", INPUTS[:2], TypeError, others=2)
cases(FUNCTIONS, "weight", TENSORS, TypeError, others=3)
cases(FUNCTIONS, "weight", ELSEWHERE, ValueError, others=2)
for name, calls in {
    "bias": [*CHANNELS, *CENTRED],
    "running_mean": [batch_norm, *CENTRED],
    "running_var": [batch_norm, *ROWS],
    "residual": [batch_norm, *ADDING],
    "input_bias": [layer_norm],
}.items():
    cases(calls, name, TENSORS[:3], TypeError, others=3)
    cases(calls, name, ELSEWHERE, ValueError, others=2)
COUNTED = [batch_norm, *ROWS]
cases(COUNTED, "num_batches_tracked", BAD_TENSORS, TypeError)
cases(COUNTED, "num_batches_tracked", [ON_META, torch.arange(3)], ValueError, others=2)
for name in ("running_mean", "running_var"):
    both = {"running_mean": MEAN[0], "running_var": VAR[0], name: torch.ones(6)}
    caller = "functional.layer_norm"
    TABLE.append(pytest.param(layer_norm, both, ValueError, caller, name))

cases([*FUNCTIONS, *LAYERS], "eps", BAD_NUMBERS, TypeError)
cases([*CHANNELS, *CENTRED, *BATCH_NORMS, make_layer_norm], "eps", [None], TypeError)
cases([*COUNTED, *LAYERS, instance_norm], "momentum", BAD_NUMBERS, TypeError)
cases([*COUNTED, *LAYERS], "momentum", NOT_FINITE, ValueError)
updating = partial(instance_norm, running_mean=MEAN[:4], running_var=VAR[:4])
cases([updating], "momentum", [None], TypeError)
cases(RMS, "weight_offset", [None, True], TypeError, others=2)
cases([batch_norm], "training", BAD_FLAGS, TypeError)
cases([instance_norm], "use_input_stats", [1, None], TypeError)
cases(
    CHANNELS,
    "activation",
    ["tanh", BAD_PAIRS[0], 3, ["relu"], *BAD_PAIRS[1:]],
    ValueError,
    2,
)
cases([*FUNCTIONS, *LAYERS, *SWAPS], "backend", BAD_NAMES, ValueError)
written = [*ROWS, group_norm, *ROW_LAYERS, make_group_norm, *SWAPS]
cases(written, "autocast_output", ["half", None, True], ValueError)

cases(ROWS, "normalized_shape", BAD_ROWS, TypeError)
cases(ROWS, "normalized_shape", [(5,), (0,), (-6,), []], ValueError, others=2)
cases(ROW_LAYERS, "normalized_shape", [[1.0], *BAD_COUNTS[:4], {}.get], TypeError)
cases(ROW_LAYERS, "normalized_shape", [0, [0], [-1], -3], ValueError)
cases([group_norm, make_group_norm], "num_groups", [1.5, True, None], TypeError)
cases([group_norm], "num_groups", [*BAD_SIZES, 4], ValueError)
cases([make_group_norm], "num_channels", [0, -6], ValueError)
cases([*BATCH_NORMS, make_instance_norm], "num_features", BAD_COUNTS, TypeError)
cases(BATCH_NORMS, "num_features", BAD_SIZES, ValueError)
for name in ("affine", "track_running_stats"):
    cases(BATCH_NORMS, name, ["yes"], TypeError)
cases(ROW_LAYERS, "elementwise_affine", ["yes"], TypeError)
tracking = [*ROW_LAYERS, make_group_norm, *SWAPS]
cases(tracking, "track_running_stats", BAD_CHOICES, TypeError)

cases([*SWAPS, plan], "sync", [None], TypeError)
cases(SWAPS, "preserve_output", [1], TypeError)
cases([*SWAPS, plan], "include", BAD_FILTERS, TypeError)
cases([*SWAPS, plan], "exclude", [3], TypeError)
with_mode = [swap, swapped, SwapNorms, set_mode, *FUNCTIONS, make_group_norm, *ROW_LAYERS]
cases(with_mode, "mode", BAD_MODES, ValueError)
cases([fuse], "recompute", [None], TypeError)
cases([unswap], "fold", [None], TypeError)
cases([VarianceLogger], "every_n_steps", [1.5, None], TypeError)
cases([VarianceLogger], "every_n_steps", BAD_SIZES, ValueError)
cases([VarianceLogger], "dirpath", [3, b"x", [], X], TypeError)


@pytest.mark.parametrize(("call", "arguments", "error", "caller", "name"), TABLE)
def test_an_invalid_argument_raises_an_error_with_the_rule(
    call, arguments, error, caller, name
):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^normplug(\.{caller})?: .*{name}"
    ) as raised:
        call(**arguments)
    assert raised.type is error
    assert "; got " in str(raised.value) or "go together" in str(raised.value)


@pytest.mark.parametrize(
    ("call", "options", "error", "message"),
    [
        (batch_norm, {"input": X.long()}, TypeError, r"got torch.int64.*input.float\(\)"),
        (batch_norm, {"input": X[0]}, ValueError, r"\(N, C\).*shape \(6,\)"),
        (batch_norm, {"input": X[:1]}, ValueError, r"more than one value per .*\(1, 6\)"),
        (
            batch_norm,
            {"weight": VAR[:4]},
            ValueError,
            r"must be \(C,\) = \(6,\).*got \(4,\)",
        ),
        (
            batch_norm,
            {"running_mean": MEAN},
            ValueError,
            "go together; got only running_mean",
        ),
        (
            batch_norm,
            {"running_var": VAR},
            ValueError,
            "go together; got only running_var",
        ),
        (
            batch_norm,
            {"training": False},
            ValueError,
            "training=False normalises by running_mean",
        ),
        (
            batch_norm,
            {"backend": "cuda"},
            ValueError,
            "'auto', 'triton', 'torch'; got 'cuda'",
        ),
        (
            batch_norm,
            {**RUNNING, "momentum": None},
            ValueError,
            "num_batches_tracked to count",
        ),
        (layer_norm, {"normalized_shape": (5,)}, ValueError, r"=\(5,\); got .* \(4, 6\)"),
        (
            layer_norm,
            {"weight": VAR[:1]},
            ValueError,
            r"weight must be .* \(6,\); got \(1,\)",
        ),
        (layer_norm, {"input_bias": X}, ValueError, "input_bias must be of shape"),
        (
            rms_norm,
            {"running_var": VAR[0], "momentum": None},
            ValueError,
            "num_batches_tracked",
        ),
        (
            group_norm,
            {"num_groups": 4},
            ValueError,
            "must be a divisor of the 6 .* got 4",
        ),
        (
            group_norm,
            {"input": X[:1], "num_groups": 6},
            ValueError,
            "than one value per group",
        ),
        (instance_norm, {"input": X}, ValueError, "more than one spatial position"),
        *(
            (
                call,
                {"backend": "triton"},
                NotImplementedError,
                f"{WHY}.*Use backend='auto'",
            )
            for call in (batch_norm, layer_norm, rms_norm, group_norm)
        ),
    ],
)
def test_an_invalid_call_raises_an_error_with_the_rule_and_the_values(
    call, options, error, message
):
    name = call.func.__name__
    with pytest.raises(error, match=rf"normplug.functional.{name}: .*{message}"):
        call(**options)


ON_MODELS = [
    "unswap",
    "plan",
    "check",
    "fuse",
    "unfuse",
    "fusions",
    "set_mode",
    "swapped",
]
NO_MODELS = [None, 3, "model", {}, nn.Linear, ARRAY, X]


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("swap", value) for value in NO_MODELS), *((name, None) for name in ON_MODELS)],
)
def test_every_function_rejects_a_model_that_is_not_a_module(name, value):
    arguments = ("golden",) if name == "set_mode" else ()
    text = rf"^normplug\.{name}: model must be an nn.Module; got "
    with pytest.raises(TypeError, match=text), contextlib.ExitStack() as stack:
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
    with pytest.raises(
        TypeError, match=rf"^normplug\.BatchNorm2d: .* argument:? '{name}'\.$"
    ):
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
    "wrong", [nn.Parameter(torch.ones(())), nn.Linear(1, 1)], ids=["p", "m"]
)
@pytest.mark.parametrize(
    "name", ["mode", "target_variance", "backend", "autocast_output", "statistics"]
)
def test_a_setting_is_never_registered_as_a_parameter_or_a_module(name, wrong):
    layer = normplug.RMSNorm(6, mode=0.5)
    before = layer._normplug
    rule = "mode" if name == "target_variance" else name
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
    for wrong in (
        {"mode": "x" * 10**5},
        {"backend": "x" * 10**5},
        {"activation": "x" * 10**5},
    ):
        with pytest.raises(ValueError, match="got 'xxx") as raised:
            functional.batch_norm(X, None, None, training=True, **wrong)
        assert len(str(raised.value)) < 400


def stock_batch_norm(x, mean, var, weight, bias, training=False, momentum=0.1, eps=1e-5):
    """`F.batch_norm`, which refuses an eps below 0 in newer versions."""
    return torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, False)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [None, -0.5, 0, float("inf"), float("nan")])
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


NUMBER = torch.tensor(0.5)


@pytest.mark.parametrize("call", FUNCTIONS)
def test_an_eps_may_be_a_tensor_of_no_dimensions(call):
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
