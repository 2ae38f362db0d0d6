"""What GroupNorm and InstanceNorm have that other layers do not."""

import copy
import warnings

import pytest
import torch
from torch import nn

import normplug
from normplug import GroupNorm, check, set_mode, swap, unswap
from normplug.modules import LazyInstanceNorm2d
from swap_cases import one_graph

SHAPES = {"1d": (3, 4, 5), "2d": (3, 4, 5, 2), "3d": (3, 4, 2, 5, 2)}


def test_a_group_norm_that_is_rebuilt_gives_nan():
    layer, x = GroupNorm(2, 4, mode="golden"), torch.randn(3, 4, 5)
    rebuilt = nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, layer.affine)
    assert rebuilt(x).isnan().all()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("track", [False, True])
def test_an_unbatched_input_is_one_sample(kind, track):
    layer = getattr(normplug, f"InstanceNorm{kind}")(4, affine=True, track_running_stats=track)
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


def test_a_compiled_layer_is_one_graph_and_follows_its_mode():
    layer = normplug.InstanceNorm2d(4, affine=True, track_running_stats=True)
    twin, compiled = copy.deepcopy(layer), one_graph(layer)
    for mode, batch in (("golden", 2), (0.5, 3)):
        set_mode(layer, mode)
        x = torch.randn(batch, 4, 3, 2)
        torch.testing.assert_close(compiled(x), set_mode(twin, mode)(x))
    torch.testing.assert_close(layer.running_var, twin.running_var)
