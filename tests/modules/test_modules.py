import copy
import io
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import normplug
from matrix import reloaded
from normplug import BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm, RMSNorm
from normplug.modules import table
from normplug.modules.probe import Probe, averages
from swap_cases import one_graph

PAIRS = [
    (BatchNorm1d, nn.BatchNorm1d, (6, 4)),
    (BatchNorm1d, nn.BatchNorm1d, (6, 4, 5)),
    (BatchNorm2d, nn.BatchNorm2d, (6, 4, 5, 3)),
    (BatchNorm3d, nn.BatchNorm3d, (6, 4, 2, 5, 3)),
    (LayerNorm, nn.LayerNorm, (6, 5, 4)),
    (RMSNorm, nn.RMSNorm, (6, 5, 4)),
]
GROUP = (partial(normplug.GroupNorm, 2), partial(nn.GroupNorm, 2), (6, 4, 5))
INSTANCE_SHAPES = {"1d": (3, 4, 5), "2d": (3, 4, 5, 2), "3d": (3, 4, 2, 5, 2)}
INSTANCES = [
    (getattr(normplug, f"InstanceNorm{kind}"), getattr(nn, f"InstanceNorm{kind}"), shape)
    for kind, shape in INSTANCE_SHAPES.items()
]
AFFINE_INSTANCE = (*(partial(of, affine=True) for of in INSTANCES[0][:2]), (6, 4, 5))
SYNC = (normplug.SyncBatchNorm, nn.SyncBatchNorm, (6, 4, 5))


def randomise(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return layer


@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS, GROUP, *INSTANCES])
@pytest.mark.parametrize("mode", ["golden", 0.25, 3])
def test_the_output_has_the_target_variance(ours, stock, shape, mode):
    y = ours(4, mode=mode, eps=1e-9)(torch.randn(64, *shape[1:]) * 5 + 2)
    if issubclass(getattr(ours, "func", ours), normplug.modules.batch_norm._BatchNorm):
        rows = y.transpose(0, 1).flatten(1)
    elif ours in (LayerNorm, RMSNorm):
        rows = y
    else:
        rows = y.reshape(64, 2 if ours is GROUP[0] else 4, -1)
    variance = rows.square().mean(-1) if ours is RMSNorm else rows.var(-1, correction=0)
    expected = torch.full_like(variance, normplug.target_variance(mode))
    torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0)


class Operations(TorchDispatchMode):
    """Records torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("ours", "stock", "shape"), [*PAIRS, GROUP, SYNC, AFFINE_INSTANCE]
)
@pytest.mark.parametrize("training", [True, False])
def test_on_a_cpu_a_layer_runs_the_stock_layers_operations_and_golden_one_more_each_way(
    ours, stock, shape, training
):
    made = []
    for layer in (stock(4), ours(4), ours(4, mode="golden")):
        if isinstance(layer, LayerNorm):
            layer._leave(layer)
        with Operations() as operations:
            layer.train(training and stock is not nn.SyncBatchNorm)
            layer(torch.randn(shape, requires_grad=True)).sum().backward()
        made.append(sorted(operations.names))
    assert made[0] == made[1]
    assert sorted([*made[0], "mul.Tensor", "mul.Tensor"]) == made[2]


@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS, SYNC, GROUP])
def test_state_dicts_are_the_stock_layers_key_for_key_and_load_strictly_both_ways(
    ours, stock, shape
):
    layer, theirs = randomise(ours(4, mode="standard")), randomise(stock(4))
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(layer.weight, theirs.weight)
    theirs.load_state_dict(randomise(layer).state_dict(), strict=True)
    assert torch.equal(layer.weight, theirs.weight)
    missing, unexpected, errors = [], [], []
    layer._load_from_state_dict(  # as some tools do, by keywords only
        state_dict=randomise(theirs).state_dict(), prefix="", local_metadata={}, strict=True,
        missing_keys=missing, unexpected_keys=unexpected, error_msgs=errors,
    )  # fmt: skip
    assert (missing, unexpected, errors) == ([], [], [])
    assert torch.equal(layer.weight, theirs.weight)


@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS, GROUP])
def test_code_that_looks_for_attributes_finds_those_of_the_stock_layer(
    ours, stock, shape
):
    names = ("running_mean", "running_var", "num_batches_tracked", "track_running_stats")
    names += (
        "momentum",
        "affine",
        "elementwise_affine",
        "bias",
        "weight",
        "num_features",
    )
    layer, theirs = ours(4), stock(4)
    assert [n for n in names if hasattr(layer, n)] == [
        n for n in names if hasattr(theirs, n)
    ]


@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS, GROUP])
def test_other_tools_may_set_attributes_and_a_bad_setting_of_ours_is_rejected(
    ours, stock, shape
):
    layer, x = ours(4, mode="golden"), torch.randn(shape)
    assert "mode=golden" in repr(layer)
    layer.mode = 0.5
    assert "mode=0.5" in repr(layer)
    assert layer.mode == normplug.NormMode(0.5)
    expected = layer(x)
    layer.mode = None  # as Liger does
    layer.fused = layer.settings = layer.impl = layer.row_mode = True
    torch.testing.assert_close(layer(x), expected)
    for name in ("mode", "target_variance", "backend", "autocast_output"):
        with pytest.raises(ValueError, match="normplug.* must be .*'silver'"):
            setattr(layer, name, "silver")
    assert (layer.mode.target_variance, layer.backend) == (0.5, "auto")


def test_torchs_rms_norm_calls_its_input_x():
    x = torch.randn(6, 4)
    assert torch.equal(RMSNorm(4)(x=x), nn.RMSNorm(4)(x=x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'input'"):
        RMSNorm(4)(input=x)


def test_a_strict_load_still_rejects_other_missing_or_unexpected_keys():
    layer = LayerNorm(4, mode="standard")
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        layer.load_state_dict({"bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="Unexpected key.*gain"):
        layer.load_state_dict({**layer.state_dict(), "gain": torch.zeros(4)})


@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS, GROUP, *INSTANCES])
def test_checkpoints_carry_the_mode_and_loading_into_another_mode_warns(
    ours, stock, shape
):
    state = reloaded(
        nn.Sequential(ours(4, mode="golden")).state_dict(), weights_only=True
    )
    # These must not warn: pytest turns warnings into errors.
    nn.Sequential(ours(4, mode="golden")).load_state_dict(state)
    # Has no record of a mode.
    nn.Sequential(ours(4, mode=0.5)).load_state_dict(dict(state))
    nn.Sequential(ours(4, mode=1.0)).load_state_dict(nn.Sequential(stock(4)).state_dict())
    with pytest.warns(
        UserWarning, match=r"mode golden is loaded into layers of mode 0\.5"
    ):
        nn.Sequential(ours(4, mode=0.5)).load_state_dict(state)
    message = r"mode standard is loaded into layers of mode golden.*set_mode\(model, 'standard'\)"
    with pytest.warns(UserWarning, match=message) as said:
        nn.Sequential(ours(4, mode="golden")).load_state_dict(
            nn.Sequential(stock(4)).state_dict()
        )
    assert [each.filename for each in said] == [__file__]


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS, SYNC, *INSTANCES])
def test_a_pickle_names_the_stock_class_and_is_the_layer_again(ours, stock, shape):
    layer, x = randomise(ours(4, mode=0.3)).eval(), torch.randn(shape)
    file = pickle.dumps(layer, protocol=0)
    assert f"c{stock.__module__}\n{stock.__name__}\n".encode() in file
    assert f"c{ours.__module__}\n{ours.__name__}\n".encode() not in file
    for twin in (copy.deepcopy(layer), pickle.loads(file), saved_and_loaded(layer)):
        assert type(twin) is ours
        assert twin.target_variance == 0.3
        assert torch.equal(twin(x), layer(x))


class Mine(LayerNorm):
    """A user's own subclass."""


def test_a_users_subclass_is_pickled_by_its_own_class():
    layer = Mine(4, mode=0.3)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is Mine
        assert twin.target_variance == 0.3


def test_a_pickle_of_a_class_that_is_not_known_here_says_the_way_out(monkeypatch):
    file = pickle.dumps(LayerNorm(4))
    monkeypatch.delitem(table.REPLACEMENTS, nn.LayerNorm)
    with pytest.raises(RuntimeError, match=r"a swapped torch.*LayerNorm.*state_dict"):
        pickle.loads(file)


WATCHED_0_2 = {"running_mean": torch.tensor(2.0), "running_var": torch.tensor(3.0)}
WATCHED_0_2 |= {"num_batches_tracked": torch.tensor(7)}


def test_a_checkpoint_of_version_0_2_has_statistics_of_layer_norms_and_loads():
    model = nn.Sequential(LayerNorm(4), normplug.GroupNorm(2, 4))
    state = model.state_dict() | {
        f"0.{name}": value for name, value in WATCHED_0_2.items()
    }
    model.load_state_dict(state, strict=True)
    assert (model[0].watched_mean, model[0].watched_var) == (0, 1)


def test_an_empty_batch_has_no_variance_to_measure_and_a_single_row_has_one():
    groups = [(normplug.GroupNorm(2, 4), (6, 4)), (normplug.InstanceNorm1d(4), (6, 4, 5))]
    for layer, shape in (*((ours(4), shape) for ours, _, shape in PAIRS), *groups):
        layer._probe = Probe()
        layer(torch.randn(0, *shape[1:]))
        assert all(map(math.isnan, averages([layer._probe])[0]))
        layer(torch.randn(shape))
        assert all(map(math.isfinite, averages([layer._probe])[0]))
    layer, x = LayerNorm(5), torch.randn(5)  # a single row
    layer._probe = Probe()
    layer(x)
    assert averages([layer._probe])[0][0] == pytest.approx(x.var(correction=0).item())


def test_rms_norm_tracks_the_second_moment_only_on_request():
    model = normplug.swap(nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8)), "golden")
    assert [hasattr(m, "watched_var") for m in model] == [False, True]
    layer = normplug.swap(nn.RMSNorm(8), "golden", track_running_stats=True)
    x = torch.randn(50, 8) + 3
    layer(x)
    torch.testing.assert_close(layer.watched_var, 0.9 + 0.1 * x.square().mean())
    assert [name for name, _ in layer.named_buffers()] == ["watched_var", "watched_count"]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.watched_var, layer.watched_var)
    normplug.unswap(layer)
    assert vars(layer).keys() == vars(nn.RMSNorm(8)).keys()
    assert set(layer.state_dict()) == {"weight"}


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, GROUP[0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_watched_statistics_are_exact_far_from_zero_and_rest_in_evaluation(
    kind, dtype, momentum
):
    layer = kind(32, momentum=momentum, track_running_stats=True, dtype=dtype)
    mean, var = 0.0, 1.0
    for step in range(1, 4):
        x = (torch.randn(50, 32, dtype=torch.float64) * step + 1000).to(dtype)
        assert torch.equal(layer(x), kind(32, track_running_stats=False, dtype=dtype)(x))
        rows = x.double().reshape(50 * (2 if kind is GROUP[0] else 1), -1)
        m = 1 / step if momentum is None else momentum
        mean = (1 - m) * mean + m * rows.mean()
        moment = (
            rows.square().mean() if kind is RMSNorm else rows.var(1, correction=0).mean()
        )
        var = (1 - m) * var + m * moment
    layer(torch.randn(0, 32, dtype=dtype))
    layer.eval()(x * 100)
    with torch.autocast("cpu"):  # here PyTorch's own forward does not run
        layer(x * 100)
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    assert layer.watched_var.dtype == dtype
    torch.testing.assert_close(layer.watched_var.double(), var, rtol=rtol, atol=0)
    if kind is not RMSNorm:
        torch.testing.assert_close(layer.watched_mean.double(), mean, rtol=rtol, atol=0)
    assert layer.watched_count == 3
    layer.reset_parameters()
    start = {"watched_mean": 0, "watched_var": 1, "watched_count": 0}
    assert dict(layer.named_buffers()) == {name: start[name] for name in layer._buffers}


def test_refused_input_leaves_the_watched_statistics():
    for layer in (LayerNorm(8), RMSNorm(8, track_running_stats=True)):
        with pytest.raises(ValueError, match="input"):
            layer(torch.randn(3, 4))
        assert layer.watched_count == 0
        assert layer.watched_var == 1


@pytest.mark.parametrize("affine", [True, False])
def test_a_call_on_the_meta_device_leaves_the_statistics_where_they_are(affine):
    layer = LayerNorm(4, elementwise_affine=affine)
    layer(torch.randn(3, 4))
    before = [buffer.clone() for buffer in layer.buffers()]
    x = torch.randn(3, 4, device="meta")
    if affine:
        with pytest.raises(
            ValueError, match="weight must be on the input's device meta; got cpu"
        ):
            layer(x)
    else:
        assert layer(x).is_meta
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("momentum", "last"), [(0.1, True), (None, False)])
@pytest.mark.parametrize(("ours", "stock", "shape"), [*PAIRS[:4], SYNC])
def test_a_checkpointed_block_gets_the_stock_statistics(
    ours, stock, shape, last, reentrant, momentum
):
    batches = torch.randn(3, *shape) * 2 + 1
    found = []
    for cls in (ours, stock):
        norm = cls(4, momentum=momentum)
        block = norm if last else nn.Sequential(norm, nn.Sigmoid())
        for x in batches.clone().requires_grad_().unbind():
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        found.append(norm)
    torch.testing.assert_close(*(dict(norm.named_buffers()) for norm in found))


@pytest.mark.parametrize("kind", INSTANCE_SHAPES)
@pytest.mark.parametrize("track", [False, True])
def test_an_unbatched_input_is_one_sample(kind, track):
    layer = getattr(normplug, f"InstanceNorm{kind}")(
        4, affine=True, track_running_stats=track
    )
    twin, x = copy.deepcopy(layer), torch.randn(INSTANCE_SHAPES[kind][1:])
    torch.testing.assert_close(layer(x), twin(x[None])[0])
    torch.testing.assert_close(dict(layer.named_buffers()), dict(twin.named_buffers()))
    torch.testing.assert_close(layer.eval()(x), twin.eval()(x[None])[0])


def test_an_unexpected_number_of_channels_or_dimensions_is_rejected():
    with pytest.raises(ValueError, match=r"weight must be \(C,\) = \(3,\)"):
        normplug.InstanceNorm1d(4, affine=True)(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        normplug.InstanceNorm1d(4)(torch.randn(2, 4, 5, 6))
    with pytest.raises(ValueError, match="expected 4D input"):
        BatchNorm2d(4)(torch.randn(2, 4))


@pytest.mark.parametrize("kind", ["InstanceNorm2d", "BatchNorm2d"])
def test_a_lazy_layer_is_swapped_once_it_has_a_shape(kind):
    model, x = (
        nn.Sequential(getattr(nn, f"Lazy{kind}")(affine=True)),
        torch.randn(2, 4, 3, 3),
    )
    with pytest.warns(
        UserWarning, match="it is lazy and has no shape yet: run one forward"
    ):
        normplug.swap(model, "golden")
    assert type(model[0]) is getattr(nn, f"Lazy{kind}")
    y = model(x)
    torch.testing.assert_close(normplug.swap(model)(x), y)
    assert type(model[0]) is getattr(normplug, kind)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_an_instance_norm_takes_statistics_of_any_dtype(dtype, training, affine):
    stock = nn.InstanceNorm2d(4, affine=affine, track_running_stats=True).train(training)
    stock.running_mean, stock.running_var = (
        torch.randn(4).to(dtype),
        torch.rand(4).to(dtype) + 0.5,
    )
    try:
        copy.deepcopy(stock)(torch.randn(3, 4, 5, 2))
    except RuntimeError as error:  # as torch 2.6 to 2.10 do
        pytest.skip(f"torch itself refuses them: {error}")
    for mode in ("standard", "golden"):
        layer = normplug.swap(copy.deepcopy(stock), mode)
        root = normplug.target_variance(mode) ** 0.5
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(3, 4, 5, 2).contiguous(memory_format=memory_format)
            y, expected = layer(x), copy.deepcopy(stock)(x)
            torch.testing.assert_close(y, expected * root, check_stride=True)
            assert y.view(3, -1).shape == (3, 40)
        assert layer.running_var.dtype == dtype


def test_a_compiled_layer_is_one_graph_and_follows_its_mode():
    layer = normplug.InstanceNorm2d(4, affine=True, track_running_stats=True)
    twin, compiled = copy.deepcopy(layer), one_graph(layer)
    for mode, batch in (("golden", 2), (0.5, 3)):
        normplug.set_mode(layer, mode)
        x = torch.randn(batch, 4, 3, 2)
        torch.testing.assert_close(compiled(x), normplug.set_mode(twin, mode)(x))
    torch.testing.assert_close(layer.running_var, twin.running_var)
