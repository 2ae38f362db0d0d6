import pytest
import torch

import normplug
from normplug import functional

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage"
)


def components(dtype, layout, row=(6,)):
    shapes = [(3, *row), (5, *row), (1, *row)]
    parts = [(torch.randn(shape) * k + k).to(dtype) for k, shape in enumerate(shapes, 1)]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)


def holed(dtype):
    """A jagged tensor with holes: its buffer has unused rows between the components."""
    x = torch.randn(2, 6, 6).mul(3).to(dtype)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 2])
    x = torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged)
    return x.detach().requires_grad_()


NESTED = {
    "strided": lambda dtype: components(dtype, torch.strided),
    "jagged": lambda dtype: components(dtype, torch.jagged),
    "jagged with holes": holed,
    "strided, 2 dims": lambda dtype: components(dtype, torch.strided, (2, 6)),
    "jagged, transposed": lambda dtype: (
        components(dtype, torch.jagged, (2, 6)).detach().transpose(1, 2).requires_grad_()
    ),
    "strided, transposed": lambda dtype: torch.nested.nested_tensor(
        [torch.randn(2, n, 6, dtype=dtype) for n in (3, 4)], requires_grad=True
    ).transpose(1, 2),
}


def rows_of(nested):
    return torch.cat([part.reshape(-1, 6) for part in nested.unbind()])


@pytest.mark.parametrize(
    ("dtype", "affine", "training"),
    [
        (torch.bfloat16, True, True),
        (torch.float32, True, False),
        (torch.float32, False, True),
        (torch.float64, True, True),
    ],
)
@pytest.mark.parametrize("kind", NESTED)
def test_a_nested_tensor_is_normalised_component_by_component(
    kind, affine, dtype, training
):
    x = NESTED[kind](dtype)
    layer, dense = (
        normplug.LayerNorm(6, elementwise_affine=affine).to(dtype).train(training)
        for _ in range(2)
    )
    y = layer(x)
    rows = rows_of(x).detach().requires_grad_()
    expected = dense(rows)
    assert (type(y), y.layout) == (type(x), x.layout)
    torch.testing.assert_close(rows_of(y), expected)
    buffers = dict(layer.named_buffers()), dict(dense.named_buffers())
    torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)
    if kind in (
        "jagged with holes",
        "jagged, transposed",
    ):
        # Torch's layer has no backward here.
        return
    inputs = [x, *layer.parameters()]
    dy = torch.randn_like(expected)
    dx, *got = torch.autograd.grad(rows_of(y), inputs, dy)
    dx_rows, *wanted = torch.autograd.grad(expected, [rows, *dense.parameters()], dy)
    torch.testing.assert_close(rows_of(dx), dx_rows)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_added_compiled_and_rejected_like_dense_ones(layout):
    x = components(torch.float32, layout)
    y, total = functional.add_layer_norm(x, x, (6,))
    for whole, normed, part in zip(total.unbind(), y.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(whole, 2 * part)
        torch.testing.assert_close(normed, functional.layer_norm(whole, (6,)))
    torch.compiler.reset()
    layer, eager = (normplug.LayerNorm(6, track_running_stats=True) for _ in range(2))
    got, expected = torch.compile(layer, backend="aot_eager")(x), eager(x)
    torch.testing.assert_close(got.unbind(), expected.unbind())
    torch.testing.assert_close(layer.watched_var, eager.watched_var)
    with pytest.raises(ValueError, match=r"normalized_shape=\(5,\); got input of shape"):
        functional.layer_norm(x, (5,))
    with pytest.raises(ValueError, match="residual must have the input's shape"):
        functional.add_layer_norm(x, torch.randn(3, 5, 6), (6,))
    with pytest.raises(ValueError, match="got a nested tensor. Pad it first"):
        functional.batch_norm(x, None, None, training=True)
    with pytest.raises(ValueError, match="got a nested tensor. Pad it first"):
        functional.channel_stats(x)


def test_a_nested_tensor_without_components_or_with_ragged_rows_is_rejected():
    with pytest.raises(
        ValueError, match="a nested input needs at least one component; got none"
    ):
        functional.layer_norm(torch.nested.nested_tensor([]), (6,))
    ragged = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(2, 5)])
    with pytest.raises(
        ValueError, match=r"normalized_shape=\(6,\); got input of shape \(2, 5\)"
    ):
        functional.layer_norm(ragged, (6,))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_rms_norm_normalises_a_nested_tensor_component_by_component(layout):
    parts = [torch.randn(3, 6), torch.randn(5, 6)]
    layer = normplug.RMSNorm(6, track_running_stats=True)
    y = layer(torch.nested.nested_tensor(parts, layout=layout))
    whole = torch.cat(parts)
    torch.testing.assert_close(torch.cat(list(y.unbind())), layer.eval()(whole))
    torch.testing.assert_close(layer.watched_var, 0.9 + 0.1 * whole.square().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_default_eps_of_an_rms_norm_is_that_of_its_input_beside_a_wider_weight(dtype):
    x = torch.full((2, 6), 1e-4, dtype=dtype)  # its square is less than the eps
    weight = torch.ones(6, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    expected = x.double() / torch.sqrt(x.double().square() + eps)
    y = functional.rms_norm(x, (6,), weight)
    torch.testing.assert_close(y, expected.to(dtype))


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.3])
def test_the_watched_variance_of_equal_values_is_not_negative(eps):
    # With float32 weights, 16-bit rows take the way on which the variance comes from rstd.
    layer = normplug.LayerNorm(6, eps=eps, track_running_stats=True, momentum=1.0)
    layer(torch.full((4, 6), 3.0, dtype=torch.bfloat16))
    assert layer.watched_count == 1
    assert layer.watched_var >= 0
    assert layer.watched_var < 1e-6
