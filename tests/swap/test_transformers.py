"""torch's transformer layers, whose fast path bypasses the forward of norms that look stock."""

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from normplug import LayerNorm, check, set_mode, swap, unswap
from swap_cases import one_graph


def encoder_layer(
    norm_first=False, which=("norm1", "norm2"), cls=nn.TransformerEncoderLayer
):
    """A layer in eval mode, with normplug's norms placed by hand."""
    torch.manual_seed(0)
    layer = cls(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    for name in which:
        setattr(layer, name, LayerNorm(16, mode=0.3))
    for name in ("norm1", "norm2"):
        nn.init.normal_(getattr(layer, name).weight, 1, 0.3)
    return layer.eval()


class Subclass(nn.TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


# torch warns that nested tensors are a prototype, and that some encoders do not use them.
NESTS = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"
)
WHICH = [("norm1", "norm2"), ("norm1",), ("norm2",)]
TOKENS = torch.randn(3, 5, 16)


def golden_encoder(norm_first, of_swapped_layers):
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, batch_first=True, norm_first=norm_first
    )
    if of_swapped_layers:
        swap(layer, "golden")
    return swap(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16)), "golden")


@NESTS
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("of_swapped_layers", [True, False])
def test_transformer_encoder_validates_with_the_norms_it_trains(
    norm_first, padded, of_swapped_layers
):
    model = golden_encoder(norm_first, of_swapped_layers)
    x, mask = torch.randn(3, 5, 16), None
    if padded:
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    expected = model.train()(x, src_key_padding_mask=mask)
    real = torch.ones(3, 5, dtype=torch.bool) if mask is None else ~mask
    with torch.no_grad():
        got = model.eval()(x, src_key_padding_mask=mask)
        torch.testing.assert_close(got[real], expected[real])
        parts = [x[0, :3], x[1]]
        nested = model(torch.nested.nested_tensor(parts)).unbind()
        torch.testing.assert_close(list(nested), [model(part[None])[0] for part in parts])
        # What torch computes for padding in eval does not matter, but `unswap` must not change it.
        torch.testing.assert_close(unswap(model)(x, src_key_padding_mask=mask), got)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("which", WHICH, ids="+".join)
@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, Subclass])
def test_a_transformer_layer_calls_norms_placed_by_hand_or_swapped_alone(
    cls, which, norm_first
):
    layer, alone = (
        encoder_layer(norm_first, which, cls),
        encoder_layer(norm_first, (), cls),
    )
    for name in which:
        swap(getattr(alone, name), 0.3)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    stock = unswap(copy.deepcopy(layer))
    with torch.no_grad():
        expected = stock(TOKENS)
        for one in (layer, twin, alone):
            torch.testing.assert_close(one(TOKENS), expected)
    check(layer, TOKENS)


@pytest.mark.parametrize("which", WHICH, ids="+".join)
def test_a_compiled_or_exported_transformer_layer_calls_norms_placed_by_hand(which):
    layer = encoder_layer(which=which)
    with torch.no_grad():
        expected = unswap(copy.deepcopy(layer))(TOKENS)
        torch.testing.assert_close(one_graph(layer)(TOKENS), expected)
        for strict in (True, False):
            exported = torch.export.export(layer, (TOKENS,), strict=strict).module()
            torch.testing.assert_close(exported(TOKENS), expected)


def test_a_transformer_layer_in_mode_standard_keeps_its_fused_inference(monkeypatch):
    fused = Mock(wraps=torch._transformer_encoder_layer_fwd)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fused)
    layer = swap(encoder_layer(which=()), "standard")
    with torch.no_grad():
        layer(TOKENS)
        fused.assert_called_once()
        set_mode(layer, "golden")
        layer(TOKENS)
    fused.assert_called_once()
