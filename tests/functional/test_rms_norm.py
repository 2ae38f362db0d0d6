import pytest
import torch

import normplug
from batch_norm_cases import make
from normplug._ops.call import call
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors


def llama(x, weight):
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def t5(x, weight):
    h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (h.to(weight.dtype) if weight.dtype != torch.float32 else h)


def gemma(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + weight.float())).type_as(x)


FAMILIES = [(llama, 0.0, "input"), (t5, 0.0, "weight"), (gemma, 1.0, None)]


@pytest.mark.parametrize(("stock", "offset", "rounding"), FAMILIES, ids=["llama", "t5", "gemma"])
@pytest.mark.parametrize("params", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_each_family_rounds_where_its_library_does(stock, offset, rounding, params, dtype):
    x, weight, _ = make((5, 3, 16), (16,), dtype, params=params)
    spec = LayerNormSpec((16,), None, 1e-6, 1.0, None, "float32", False, offset, rounding)
    y = call("test", Tensors(x, weight=weight), spec, "torch")
    expected = stock(x, weight)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_normalised_component_by_component(layout):
    parts = [torch.randn(3, 6), torch.randn(5, 6)]
    layer = normplug.RMSNorm(6, track_running_stats=True)
    y = layer(torch.nested.nested_tensor(parts, layout=layout))
    whole = torch.cat(parts)
    torch.testing.assert_close(torch.cat(list(y.unbind())), layer.eval()(whole))
    torch.testing.assert_close(layer.watched_var, 0.9 + 0.1 * whole.square().mean())
