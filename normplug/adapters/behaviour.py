"""What the forward of any class computes, learned by running it on small inputs.

`formula_of` runs the forward of a layer on the CPU, with random tensors in place of the layer's. In
float64 it learns which tensor is the weight and which the bias, whether rows are centred, and which
eps is added. It compares results and gradients with normplug's formula. For each pair of dtypes it
then compares the bits and the dtypes of results with each way to round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from normplug._torch import RMS_NORM_AUTOCASTS

# (input dtype, weight dtype): for these, kinds of rounding differ in the result's bits or dtype.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
_HALF = (torch.bfloat16, torch.float16)
_OPEN = 1.2784645427610738  # silu(_OPEN) is 1: a gate of it has no effect
# The kinds of rounding of an RMSNorm: see `LayerNormSpec.rounding`.
_ROUNDINGS = ("output", None, "input", "weight")
# The functions of torch that autocast on CUDA runs in float32.
_AUTOCAST = [F.layer_norm, torch.layer_norm, torch.native_layer_norm]
if RMS_NORM_AUTOCASTS:
    _AUTOCAST += [F.rms_norm, torch.rms_norm]
_DEVICES = ("cpu", "cuda")  # for which a forward may switch autocast off
# The share of half-precision results that may differ: float32 results that differ in the last bit
# rarely lie on two sides of a rounding boundary.
_SHARE = 0.01
_MANY = 1 << 16
_OTHER_GATE = "its second argument is not a silu gate"
_OTHER_EPS = "its eps is not added to the variance inside the root"
_Values: TypeAlias = Mapping[str, Tensor]


class _Result(NamedTuple):
    """The inputs, the tensors and the result of a forward."""

    x: Tensor
    gate: Tensor | None
    values: _Values
    y: Tensor


class NotANormError(Exception):
    """The class does not normalise rows."""


class UnlikeError(Exception):
    """The class normalises rows, but not as normplug does; the text says what differs."""


class ImpureError(Exception):
    """The forward does more than compute; the text says what."""


class Formula(NamedTuple):
    """What a class computes, in the terms of `LayerNormSpec`. A pickle of its layers holds it.

    Attributes:
        centred: whether it subtracts the mean: a LayerNorm, not an RMSNorm.
        weight: the name of its weight.
        bias: the name of its bias, or None.
        eps_name: the name of its eps, or None if that is a constant of the forward.
        eps: the constant, or None if it depends on the dtype or has a name.
        weight_offset: what it adds to the weight, 0 or 1.
        gate: where silu of a second input is multiplied, "first" or "last"; None without one.
        group_size: how many values of a row are normalised together if there is a gate; else None.
        rounding: where it rounds.
        channels_first: whether it takes (N, C, H, W), and the rows are the channels.
        autocasts: whether autocast on CUDA makes it return float32.
        is_exact: whether it has the same bits, and not only the same values up to rounding.
    """

    centred: bool
    weight: str
    bias: str | None
    eps_name: str | None
    eps: float | None
    weight_offset: float
    gate: str | None
    group_size: int | None
    rounding: str | None
    channels_first: bool
    autocasts: bool
    is_exact: bool


class Layer(NamedTuple):
    """What the forward of a layer may read. It is hashable: layers that are alike are equal.

    Attributes:
        cls: its class.
        parameters: the names of its parameters, and whether each is a tensor or None.
        buffers: the same for its buffers.
        width: the length of all its tensors.
        settings: its other attributes, by name: values that no call can change.
        has_gate: whether its forward takes a second input.
        constants: the constants outside it that its forward reads, by name.
    """

    cls: type[nn.Module]
    parameters: tuple[tuple[str, bool], ...]
    buffers: tuple[tuple[str, bool], ...]
    width: int
    settings: tuple[tuple[str, Any], ...]
    has_gate: bool
    constants: tuple[tuple[str, Any], ...] = ()

    def names(self) -> list[str]:
        """The names of its tensors."""
        return [name for name, is_tensor in self.parameters + self.buffers if is_tensor]

    def run(
        self, inputs: Sequence[Tensor], values: _Values, settings: Mapping[str, Any]
    ) -> Tensor:
        """Run the forward of a new layer with these tensors; settings replace the layer's.

        Raises:
            ImpureError: the forward changes the layer or an input, or uses random numbers.
            NotANormError: the result has another shape than the first input.
        """
        layer: Any = object.__new__(self.cls)
        nn.Module.__init__(layer)
        vars(layer).update({"training": False, **dict(self.settings), **settings})
        for name, is_tensor in self.parameters:
            value: Any = values[name] if is_tensor else None
            if is_tensor and not isinstance(value, nn.Parameter):
                value = nn.Parameter(value.clone())
            layer.register_parameter(name, value)
        for name, is_tensor in self.buffers:
            layer.register_buffer(name, values[name].clone() if is_tensor else None)
        before = _identities(layer)
        generator = torch.get_rng_state()
        copies = [x.clone() for x in inputs]
        y = self.cls.forward(layer, *copies)
        if not torch.equal(generator, torch.get_rng_state()):
            raise ImpureError("it uses random numbers")
        now = {**layer._parameters, **layer._buffers}
        is_unchanged = all(torch.equal(now[name], values[name]) for name in self.names())
        has_hooks = any(t._backward_hooks for t in now.values() if t is not None)
        if _identities(layer) != before or not is_unchanged or has_hooks:
            raise ImpureError("its forward changes the layer")
        if not all(map(_same_values, copies, inputs)):
            raise ImpureError("its forward changes its input")
        if not isinstance(y, Tensor) or y.shape != inputs[0].shape:
            raise NotANormError
        return y


def _identities(layer: nn.Module) -> dict[str, int]:
    tensors = {**layer._parameters, **layer._buffers, **layer._modules}
    return {name: id(value) for name, value in {**vars(layer), **tensors}.items()}


def formula_of(layer: Layer) -> Formula:
    """The formula that a layer computes, whatever its class is called.

    Its forward must have no side effects.

    Raises:
        NotANormError: it does not normalise rows.
        UnlikeError: it normalises them in another way than normplug.
        ImpureError: it changes the layer or its input, or uses random numbers.
    """
    return _Probe(layer).formula()


class _Probe:
    """The steps of `formula_of`. Inputs are rows, also for a layer that takes images."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.rows = self._random_rows(1 << 11)
        self.vectors = {name: self._random(layer.width) for name in layer.names()}
        self.channels_first = False

    def _random_rows(self, values: int) -> Tensor:
        """Random rows of about `values` values in total, in four dimensions.

        No two dimensions of images from these rows have the size of the channels.
        """
        width = self.layer.width
        height = max(2, values // (4 * width))
        if height == width:
            height += 1
        return self._random(2, height, 2, width)

    def _random(self, *shape: int) -> Tensor:
        """Random values that are exact in every dtype that a probe uses."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return values.bfloat16().double()

    def _run(
        self, x: Tensor, values: _Values, gate: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """Run the forward on rows; if it needs a gate and gets none, use one without effect."""
        inputs = [x]
        if self.layer.has_gate:
            inputs.append(torch.full_like(x, _OPEN) if gate is None else gate)
        if self.channels_first:
            inputs = [each.permute(0, 3, 1, 2).contiguous() for each in inputs]
            return self.layer.run(inputs, values, settings).permute(0, 2, 3, 1)
        # Some classes accept only tensors of three dimensions.
        inputs = [each.flatten(0, 1) for each in inputs]
        return self.layer.run(inputs, values, settings).reshape(x.shape)

    def formula(self) -> Formula:
        """The formula; each step needs those before it."""
        self._find_layout()
        self._find_vectors()
        self._compare_scale()
        self._find_eps()
        self._compare_values()
        self._find_gate()
        self._compare_gradients()
        self._compare_calls()
        rounding, is_exact = self._find_rounding()
        return Formula(
            self.centred,
            self.weight,
            self.bias,
            self.eps_name,
            None if self.eps_name else self.eps,
            self.offset,
            self.gate,
            self.group_size,
            rounding,
            self.channels_first,
            self._autocasts(),
            is_exact,
        )

    def _find_layout(self) -> None:
        """Find the dimension that it normalises, the last or that of channels, and the dtype.

        A class may compute in float32, and then refuse a weight in float64.
        """
        for self.channels_first, dtype in product(
            (False, True), (torch.float64, torch.float32)
        ):
            self.x = self.rows.to(dtype)
            self.values = {name: value.to(dtype) for name, value in self.vectors.items()}
            try:
                if self._normalises():
                    break
            except ImpureError:
                raise
            except Exception:  # it does not take this layout or dtype
                continue
        else:
            raise NotANormError
        if self.channels_first:
            return
        self.channels_first = True
        try:
            self._run(self.x, self.values)
        except Exception:
            self.channels_first = False
        else:
            raise UnlikeError("it takes rows and also images with channels first")

    def _normalises(self) -> bool:
        """Whether the scale of a row has no effect, and its first value has one on the next ones.

        They are the whole row, or in a norm with a gate a group of it. The scales are so large that
        eps has no effect.
        """
        large = self._run(self.x * 2.0**10, self.values)
        larger = self._run(self.x * 2.0**20, self.values)
        if not torch.allclose(large, larger, rtol=1e-3, atol=1e-3):
            return False
        changed = self.x * 2.0**10
        changed[..., 0] *= 50
        is_close = torch.isclose(
            self._run(changed, self.values), large, rtol=1e-3, atol=1e-3
        )
        depends = ~is_close.flatten(0, -2).all(0)
        self.width = int(depends.sum())
        is_whole = self.width == self.layer.width
        is_group = self.layer.has_gate and self.layer.width % max(self.width, 1) == 0
        self.group_size = None if is_whole else self.width
        return (
            self.width > 1
            and (is_whole or is_group)
            and bool(depends[: self.width].all())
        )

    def _find_vectors(self) -> None:
        """Find which tensor is the bias, which the weight, and what is added to the weight."""
        zero = self._run(torch.zeros_like(self.x), self.values)
        if not zero.isfinite().all():
            raise UnlikeError("it returns nan for a row of zeros: it adds no eps")
        names = self.layer.names()
        biases = [n for n in names if (zero == self.values[n].to(zero.dtype)).all()]
        if not biases and zero.any():
            raise UnlikeError("it returns neither zeros nor its bias for a row of zeros")
        self.bias = biases[0] if biases else None
        weights = [name for name in names if name != self.bias]
        if len(weights) != 1:
            raise UnlikeError(f"it has {len(weights)} weights: {', '.join(weights)}")
        self.weight = weights[0]
        plain = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.offset = 1.0 if self._run(self.x, plain).any() else 0.0
        # With these, the result is the normalised row.
        self.plain = {
            **plain,
            self.weight: torch.full_like(self.x[0, 0, 0], 1 - self.offset),
        }
        mean = self._run(self.x + 8, self.plain).mean(-1)
        self.centred = bool((mean.abs() < 1e-3).all())
        if self.bias is not None and not self.centred:
            raise UnlikeError("it adds a bias, and normplug's RMSNorm has none")

    def _compare_scale(self) -> None:
        """Compare the result for rows so large that eps has no effect."""
        width = self.width
        x = self._centred_groups(self.x * 2.0**20)
        y = self._run(self.x * 2.0**20, self.plain).unflatten(-1, (-1, width))
        square = y.square().mean()
        expected = x / x.square().mean(-1, keepdim=True).sqrt() * square.sqrt()
        ratio = float(square)
        if not torch.allclose(y.to(x.dtype), expected, 1e-4, 1e-4):
            raise UnlikeError("it normalises in another way")
        if self.layer.has_gate and not _is_near(ratio, 1.0, 1e-5):
            raise UnlikeError(_OTHER_GATE)
        if _is_near(ratio, (width - 1) / width, 1e-6):
            raise UnlikeError("it divides the sum of squares by n - 1, not by n")
        if _is_near(ratio, 1 / width, 1e-6):
            raise UnlikeError(
                "it divides by the length of a row, not by its root mean square"
            )
        if not _is_near(ratio, 1.0, 1e-5):
            raise UnlikeError(f"its rows have the mean square {ratio:.4g}, not 1")

    def _centred_groups(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.width))
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _added(self, x: Tensor, **settings: Any) -> float:
        """What is added to the variance of x, as far as the result shows."""
        variance = self._centred_groups(x).double().square().mean(-1)
        y = self._run(x, self.plain, **settings).double().unflatten(-1, (-1, self.width))
        return float((variance / y.square().mean(-1) - variance).median())

    def _find_eps(self) -> None:
        """Find the value of eps, and the attribute from which the forward reads it."""
        tiny = self.x * 1e-7
        added = self._added(tiny)
        if not added > 1e-18:
            raise UnlikeError("it adds no eps to the variance")
        self.scale = added**0.5  # of rows on which eps has a clear effect
        settings = dict(self.layer.settings)
        self.eps_name: str | None = None
        self.eps: float | None = None
        for name, value in settings.items():
            if type(value) is not float and value is not None:
                continue
            try:
                changed = self._added(tiny, **{name: 4 * added})
            except Exception:  # it needs this attribute as it is
                continue
            if _is_near(changed, 4 * added):
                self.eps_name = name
                self.eps = value
                return
        if "eps" in settings:
            raise UnlikeError(_OTHER_EPS)
        if not _is_near(added, torch.finfo(self.x.dtype).eps):
            self.eps = _constant_near(added)

    def _spec(
        self, rounding: str | None = None, gate: str | None = None
    ) -> LayerNormSpec:
        shape = (self.layer.width,)
        numbers = (None, self.eps, 1.0, None, "float32")
        formula = (self.centred, self.offset, rounding, gate, self.group_size)
        return LayerNormSpec(shape, *numbers, *formula)

    def _tensors(self, x: Tensor, values: _Values, gate: Tensor | None) -> Tensors:
        bias = None if self.bias is None else values[self.bias]
        return Tensors(x, gate, values[self.weight], bias)

    def _formula(
        self,
        x: Tensor,
        values: _Values,
        gate: Tensor | None = None,
        kind: str | None = None,
    ) -> Tensor:
        t = self._tensors(x, values, gate)
        return self._spec(gate=kind).by_formula(x, t)[0]

    def _compare_values(self) -> None:
        """Compare the results for rows of each scale, far from zero, with an outlier, with nan."""
        zeros = torch.cat((self.x[:1], torch.zeros_like(self.x[:1])))
        for x in (self.x, self.x * self.scale, zeros):
            self._compare(x, self.values, _OTHER_EPS)
        for mean in (3, 100):
            far = "it is less precise for rows far from zero"
            self._compare(self.x + mean, self.values, far)
        outlier = self.x.clone()
        outlier[..., 0] = 1000
        large = {name: 1000 * value for name, value in self.values.items()}
        self._compare(outlier, large, "it limits its weight or its result")
        one = "it computes something else for one row"
        self._compare(self.x[:1, :1, :1], self.values, one)
        outlier[..., 0] = torch.nan
        y = self._run(outlier, self.values)[..., : self.width]
        if not y.isnan().all():
            raise UnlikeError("it replaces nan by numbers")

    def _compare(self, x: Tensor, values: _Values, difference: str) -> None:
        """Compare a result in the dtype of x; `difference` says what differs."""
        double = {name: value.double() for name, value in values.items()}
        single = {name: value.float() for name, value in values.items()}
        expected = self._formula(x.double(), double)
        y = self._run(x, values)
        if y.dtype != x.dtype:
            raise UnlikeError(f"it returns {_name(y.dtype)} for {_name(x.dtype)} input")
        # It may compute in float32.
        rounding = _distance(self._formula(x.float(), single), expected)
        if _distance(y, expected) > 4 * rounding + 1e-6:
            raise UnlikeError(difference)

    def _find_gate(self) -> None:
        """Find where silu of the gate is multiplied; check that nothing is without a gate."""
        self.gate: str | None = None
        if not self.layer.has_gate:
            return
        x = self.x.flatten(0, 1)
        try:
            y = self.layer.run([x], self.values, {})
        except Exception:  # it must have a gate
            y = self._run(self.x, self.values).flatten(0, 1)
        if not torch.allclose(
            y, self._run(self.x, self.values).flatten(0, 1), 1e-4, 1e-4
        ):
            raise UnlikeError("it computes something else without a gate")
        gate = self._random(*self.x.shape).to(self.x.dtype)
        y = self._run(self.x, self.values, gate)
        for self.gate in ("first", "last"):
            expected = self._formula(self.x, self.values, gate, self.gate)
            if _distance(y, expected) <= 1e-4 * float(expected.abs().max()):
                return
        raise UnlikeError(_OTHER_GATE)

    def _compare_gradients(self) -> None:
        """Compare gradients: a forward may detach its divisor, or have its own backward."""
        x = self.x + 3
        gate = self._random(*x.shape).to(x.dtype) if self.layer.has_gate else None
        seed = self._random(*x.shape).to(x.dtype)
        theirs = self._gradients(self._run, x, gate, seed)
        ours = self._gradients(partial(self._formula, kind=self.gate), x, gate, seed)
        for one, other in zip(theirs, ours, strict=True):
            assert other is not None
            allowed = 1e-3 * float(other.abs().max())
            if one is None or _distance(one, other) > allowed:
                raise UnlikeError("its gradients are not those of its result")

    def _gradients(
        self, function: Any, x: Tensor, gate: Tensor | None, seed: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs and of each parameter."""
        with torch.enable_grad():
            inputs = [t.clone().requires_grad_() for t in (x, gate) if t is not None]
            values = {name: nn.Parameter(t.clone()) for name, t in self.values.items()}
            leaves = [
                values[name] for name, is_tensor in self.layer.parameters if is_tensor
            ]
            y = function(inputs[0], values, *inputs[1:])
            if not y.requires_grad:
                raise UnlikeError("its result has no gradients")
            return torch.autograd.grad(y, [*inputs, *leaves], seed, allow_unused=True)

    def _compare_calls(self) -> None:
        """Compare calls in training, with frozen parameters, and with other shapes."""
        x = self.x.float()
        values = {name: value.float() for name, value in self.values.items()}
        y = self._run(x, values)
        if not torch.equal(y, self._run(x, values, training=True)):
            raise UnlikeError("it computes something else in training")
        frozen = {name: nn.Parameter(t, False) for name, t in values.items()}
        if not torch.equal(y, self._run(x, frozen)):
            raise UnlikeError("it computes something else if its parameters are frozen")
        for dimensions in range(1, 6):
            self._compare_shape(dimensions, -1, values)
            if dimensions > 2:
                self._compare_shape(dimensions, 1, values)

    def _compare_shape(self, dimensions: int, dim: int, values: _Values) -> None:
        """Compare a call whose input has the width of the layer in dimension `dim` alone."""
        width = self.layer.width
        shape = [3 if width == 2 else 2] * dimensions
        shape[dim] = width
        x = self._random(*shape).float()
        inputs = [x, torch.full_like(x, _OPEN)][: 1 + self.layer.has_gate]
        try:
            y = self.layer.run(inputs, values, {})
        except Exception:  # it does not take this shape
            return
        if dimensions > 2 and (dim == 1) != self.channels_first:
            raise UnlikeError(
                "the dimension that it normalises depends on the shape of its input"
            )
        expected = self._formula(x.movedim(dim, -1), values).movedim(-1, dim)
        if not torch.allclose(y, expected, 1e-4, 1e-4):
            raise UnlikeError("it depends on the number of dimensions of its input")

    def _find_rounding(self) -> tuple[str | None, bool]:
        """Find where the forward rounds, and whether all bits are the same."""
        results = list(self._results())
        # The problem of the kind of rounding that explains the most results.
        most, problem = -1, ""
        near: list[str | None] = []
        for rounding in (None,) if self.centred else _ROUNDINGS:
            differences = [self._differs(result, rounding) for result in results]
            problems = [text for text in differences if text]
            if set(differences) == {None}:
                return rounding, True
            if not problems:
                near.append(rounding)
            elif len(results) - len(problems) > most:
                most, problem = len(results) - len(problems), problems[0]
        if near:
            return near[0], False
        raise UnlikeError(problem)

    def _results(self) -> Iterator[_Result]:
        """Results in each pair of dtypes that the forward takes."""
        for of_x, of_weight in DTYPES:
            values = {name: value.to(of_weight) for name, value in self.vectors.items()}
            # One of 20,000 results differs between ways to compute a LayerNorm of 16-bit rows.
            rows = self._random_rows(_MANY) if of_x in _HALF else self.rows
            # Rows far from zero, as far as the dtype has digits for them; and of the size of eps.
            inputs = [rows + 3, self.rows * self.scale]
            if of_x == of_weight == torch.float32:
                inputs.append(rows + 100)
            for x in inputs:
                x = x.to(of_x)
                gate = self._random(*x.shape).to(of_x) if self.layer.has_gate else None
                try:
                    yield _Result(x, gate, values, self._run(x, values, gate))
                except RuntimeError as error:
                    if of_x == of_weight == torch.float32:
                        text = str(error).partition("\n")[0]
                        raise UnlikeError(
                            f"its forward fails in float32: {text}"
                        ) from error

    def _differs(self, result: _Result, rounding: str | None) -> str | None:
        """How a result differs from normplug's; "" if only in rounding, None if not at all."""
        x, gate, values, theirs = result
        dtypes = (
            f"{_name(x.dtype)} input with a {_name(values[self.weight].dtype)} weight"
        )
        tensors = self._tensors(x, values, gate)
        ours = self._spec(rounding, self.gate).by_torch(tensors)
        if theirs.dtype != ours.dtype:
            return f"it returns {_name(theirs.dtype)} for {dtypes}"
        if torch.equal(theirs, ours):
            return None
        if x.dtype in _HALF or theirs.dtype in _HALF:
            off = float((theirs != ours).float().mean())
            return "" if off <= _SHARE else f"it rounds between its steps for {dtypes}"
        wide = {name: value.double() for name, value in values.items()}
        wide_gate = None if gate is None else gate.double()
        expected = self._formula(x.double(), wide, wide_gate, self.gate)
        allowed = 4 * _distance(ours, expected) + 1e-6 * float(expected.abs().max())
        if _distance(theirs, expected) <= allowed:
            return ""
        return f"it is less precise for {dtypes}"

    def _autocasts(self) -> bool:
        half = {name: value.bfloat16() for name, value in self.vectors.items()}
        before = {device: torch.is_autocast_enabled(device) for device in _DEVICES}
        for device in _DEVICES:
            torch.set_autocast_enabled(device, True)
        try:
            with _CudaAutocast():
                y = self._run(self.x.bfloat16(), half)
        finally:
            for device, was_enabled in before.items():
                torch.set_autocast_enabled(device, was_enabled)
        return y.dtype == torch.float32


class _CudaAutocast(TorchFunctionMode):
    """Has torch's norms of rows compute and return float32, as autocast does on CUDA.

    A forward may switch autocast off, for CUDA or for the device of its input.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        if func in _AUTOCAST and all(map(torch.is_autocast_enabled, _DEVICES)):
            args = [_float(value) for value in args]
            kwargs = {name: _float(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def _same_values(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, 0.0, 0.0, equal_nan=True)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def _is_near(one: float, other: float, tolerance: float = 1e-3) -> bool:
    return abs(one - other) <= tolerance * abs(other)


def _constant_near(added: float) -> float:
    """The number in the code of a forward that adds this: few digits, or a dtype's epsilon."""
    constants = [torch.finfo(dtype).eps for dtype in (torch.float32, *_HALF)]
    constants += [float(f"{added:.{digits}e}") for digits in range(6)]
    return next(eps for eps in constants if _is_near(eps, added, 1e-5))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
