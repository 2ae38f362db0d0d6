"""The layers GroupNorm and InstanceNorm, compared with torch's."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from accuracy import assert_same_bits
from normplug import GroupNorm, NormMode, check, set_mode, swap, unswap
from normplug.modules import LazyInstanceNorm2d
from swap_cases import one_graph

SHAPES = {"1d": (3, 4, 5), "2d": (3, 4, 5, 2), "3d": (3, 4, 2, 5, 2)}
GROUP_OPTIONS = [{}, {"affine": False}, {"eps": 1e-3}, {"dtype": torch.float64}]
INSTANCE_OPTIONS = [{}, {"affine": True, "track_running_stats": True}, {"dtype": torch.float64}]
INSTANCE_OPTIONS += [{"track_running_stats": True, "momentum": None}, {"affine": True, "eps": 1e-3}]
INSTANCE_OPTIONS += [{"eps": 0}]


def instance_norm(library, kind):
    return getattr(library, f"InstanceNorm{kind}")


CASES = [
    *((partial(GroupNorm, 2), partial(nn.GroupNorm, 2), (3, 4, 5), o) for o in GROUP_OPTIONS),
    *(
        (instance_norm(normplug, kind), instance_norm(nn, kind), shape, options)
        for kind, shape in SHAPES.items()
        for options in INSTANCE_OPTIONS
    ),
]
EACH = [CASES[0][:3], *(case[:3] for case in CASES[len(GROUP_OPTIONS) :: len(INSTANCE_OPTIONS)])]


def randomise(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return layer


def outputs(layer, x):
    x = x.detach().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    names = ["dx", *(name for name, _ in layer.named_parameters())]
    return {"y": y, **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize(("ours", "stock", "shape", "options"), CASES)
def test_standard_equals_the_torch_layer_bit_for_bit(ours, stock, shape, options):
    theirs = randomise(stock(4, **options))
    layer = ours(4, mode="standard", **options)
    assert layer.state_dict().keys() == theirs.state_dict().keys()
    layer.load_state_dict(theirs.state_dict())
    assert isinstance(layer, type(theirs))
    for training in (True, True, False):
        x = torch.randn(shape, dtype=options.get("dtype")) + 2
        got, expected = (outputs(each.train(training), x) for each in (layer, theirs))
        if training or not options.get("track_running_stats"):
            assert_same_bits(got, expected)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for name, buffer in theirs.named_buffers():
            assert torch.equal(layer.get_buffer(name), buffer)


@pytest.mark.parametrize(("ours", "stock", "shape"), EACH)
def test_the_output_has_the_target_variance(ours, stock, shape):
    y = ours(4, mode=0.25, eps=1e-9)(torch.randn(shape) * 5 + 2)
    groups = 2 if ours is EACH[0][0] else 4
    variance = y.reshape(3, groups, -1).var(-1, correction=0)
    torch.testing.assert_close(variance, torch.full_like(variance, 0.25), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("ours", "stock", "shape"), EACH)
def test_checkpoints_copies_pickles_and_repr_carry_the_mode(ours, stock, shape):
    layer, x = ours(4, mode=0.3), torch.randn(shape)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert twin.mode == NormMode(0.3)
        assert torch.equal(twin(x), layer(x))
    assert repr(layer).endswith("mode=0.3)")
    state = nn.Sequential(layer).state_dict()
    nn.Sequential(ours(4, mode=0.3)).load_state_dict(state)
    with pytest.warns(UserWarning, match=r"mode 0\.3 is loaded into layers of mode golden"):
        nn.Sequential(ours(4, mode="golden")).load_state_dict(state)


@pytest.mark.parametrize(("ours", "stock", "shape"), EACH)
def test_a_tool_that_recomputes_the_norm_gets_nan(ours, stock, shape):
    layer, x = ours(4, mode="golden"), torch.randn(shape)

    def by_groups(norm):
        return F.group_norm(x, 2, eps=norm.eps)

    def by_instances(norm):
        return F.instance_norm(x, eps=norm.eps)

    for tool in (by_groups, by_instances):
        assert tool(layer).isnan().all()
        assert tool(set_mode(copy.deepcopy(layer), "standard")).isfinite().all()


def test_a_group_norm_that_is_rebuilt_gives_nan():
    layer, x = GroupNorm(2, 4, mode="golden"), torch.randn(3, 4, 5)
    rebuilt = nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, layer.affine)
    assert rebuilt(x).isnan().all()


@pytest.mark.parametrize("momentum", [0.25, None])
def test_group_norm_tracks_the_statistics_of_its_groups_on_request(momentum):
    assert list(GroupNorm(2, 4).buffers()) == []
    layer = GroupNorm(2, 4, track_running_stats=True, momentum=momentum)
    mean, var = 0.0, 1.0
    for step in (1, 2):
        x = torch.randn(3, 4, 5) * step + step
        assert torch.equal(layer(x), GroupNorm(2, 4)(x))
        groups = x.reshape(6, -1)
        m = 1 / step if momentum is None else momentum
        mean += m * (groups.mean().item() - mean)
        var += m * (groups.var(1, correction=0).mean().item() - var)
    layer.eval()(x)
    layer.train()(torch.randn(0, 4, 5))
    assert layer.watched_mean.item() == pytest.approx(mean, rel=1e-4)
    assert layer.watched_var.item() == pytest.approx(var, rel=1e-4)
    assert layer.watched_count == 2


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("track", [False, True])
def test_an_unbatched_input_is_one_sample(kind, track):
    layer = instance_norm(normplug, kind)(4, affine=True, track_running_stats=track)
    twin, x = copy.deepcopy(layer), torch.randn(SHAPES[kind][1:])
    torch.testing.assert_close(layer(x), twin(x[None])[0])
    torch.testing.assert_close(dict(layer.named_buffers()), dict(twin.named_buffers()))
    torch.testing.assert_close(layer.eval()(x), twin.eval()(x[None])[0])


def test_an_unexpected_number_of_channels_warns_or_is_rejected():
    x = torch.randn(2, 3, 5)
    with pytest.warns(UserWarning, match="num_features is 4, but the input has 3 channels") as told:
        normplug.InstanceNorm1d(4)(x)
    assert told[0].filename == __file__
    with pytest.raises(ValueError, match=r"weight must be \(C,\) = \(3,\)"):
        normplug.InstanceNorm1d(4, affine=True)(x)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        normplug.InstanceNorm1d(4)(torch.randn(2, 4, 5, 6))


@pytest.mark.parametrize("affine", [False, True])
def test_a_lazy_layer_is_swapped_before_and_after_its_first_forward(affine):
    x = torch.randn(2, 4, 3, 3)
    for first in (False, True):
        model = nn.Sequential(nn.LazyInstanceNorm2d(affine=affine), nn.Identity())
        if first:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of a layer that never learns its size
                model(x)
        swap(model, "golden")
        if not first:
            assert type(model[0]) is LazyInstanceNorm2d
            assert "no shape yet" in str(check(model))
            with pytest.raises(ValueError, match="has no shape yet; run one forward first"):
                unswap(model)
        y = model(x)
        assert type(model[0]) is normplug.InstanceNorm2d
        check(model, x)
        torch.testing.assert_close(unswap(model)(x), y)
        assert type(model[0]) is nn.InstanceNorm2d


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_an_instance_norm_takes_statistics_of_any_dtype(dtype, training, affine):
    stock = nn.InstanceNorm2d(4, affine=affine, track_running_stats=True).train(training)
    stock.running_mean, stock.running_var = torch.randn(4).to(dtype), torch.rand(4).to(dtype) + 0.5
    try:
        copy.deepcopy(stock)(torch.randn(3, 4, 5, 2))
    except RuntimeError as error:  # as torch 2.6 to 2.10 do
        pytest.skip(f"torch itself refuses them: {error}")
    for mode in ("standard", "golden"):
        layer = swap(copy.deepcopy(stock), mode)
        root = normplug.target_variance(mode) ** 0.5
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(3, 4, 5, 2).contiguous(memory_format=memory_format)
            y, expected = layer(x), copy.deepcopy(stock)(x)
            torch.testing.assert_close(y, expected * root, check_stride=True)
            assert y.view(3, -1).shape == (3, 40)
        assert layer.running_var.dtype == dtype


def test_invalid_arguments_are_rejected():
    for arguments, message in [((2, 5), "divisible"), ((0, 4), "num_groups must be at least 1")]:
        with pytest.raises(ValueError, match=message):
            GroupNorm(*arguments)
    with pytest.raises(TypeError, match="num_channels must be an integer"):
        GroupNorm(2, 4.0)
    with pytest.raises(TypeError, match="track_running_stats must be True or False"):
        GroupNorm(2, 4, track_running_stats=1)
    with pytest.raises(TypeError, match="normplug.InstanceNorm2d: eps must be a number"):
        normplug.InstanceNorm2d(4, eps="1")
    with pytest.raises(NotImplementedError, match="backend='triton', but"):
        GroupNorm(2, 4, backend="triton")(torch.randn(2, 4, 3))


def test_a_compiled_layer_is_one_graph_and_follows_its_mode():
    layer = normplug.InstanceNorm2d(4, affine=True, track_running_stats=True)
    twin, compiled = copy.deepcopy(layer), one_graph(layer)
    for mode, batch in (("golden", 2), (0.5, 3)):
        set_mode(layer, mode)
        x = torch.randn(batch, 4, 3, 2)
        torch.testing.assert_close(compiled(x), set_mode(twin, mode)(x))
    torch.testing.assert_close(layer.running_var, twin.running_var)
