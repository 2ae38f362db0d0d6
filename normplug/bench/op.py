"""Time a norm layer compared with torch's, after a check of its results against float64.

A layer is timed only if its error is not much larger than torch's own.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import normplug
from normplug._files import stamp
from normplug._torch import BatchNormBase
from normplug.bench import timing
from normplug.bench.rows import ORIGIN, Rows
from normplug.bench.timing import Change
from normplug.reference import accumulator_dtype

Tensors = dict[str, Tensor]

# On PyPI; a row has their versions.
RIVALS = ("liger-kernel", "flag-gems", "quack-kernels", "apex")
OURS, (EAGER, COMPILED) = "normplug", timing.PEERS
# Roundings in the accumulator dtype: of mean, rstd, weight * sqrt(tv) and the gradients' sums. And
# as many again, since the truth is rounded to float64, too.
ROUNDINGS_OF_SUMS = 8
COLUMNS = (
    *("op", "shape", "dtype", "layout", "direction", "provider"),
    *("us", "us_p20", "us_p80"),
    *("gbps", "percent_of_copy", "over_eager", "over_compile"),
    *("max_abs", "max_rel", "max_abs_f64", "max_rel_f64"),
)


class _Neighbours(nn.Module):
    """A stock norm and the operations next to it: here, an activation of its result.

    `passes` are the fewest passes over the input: of a forward, and of a forward and backward. The
    forward reads x and writes y, the backward reads dy and x and writes dx.
    """

    passes = 2, 5

    def __init__(self, norm: nn.Module, activation: Any = None) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor) -> Any:
        return self.activation(self.norm(x))


class _After(_Neighbours):
    """The activation of a norm's result + residual."""

    passes = 3, 7  # it reads the residual, and writes its gradient

    def forward(self, x: Tensor, residual: Tensor) -> Any:  # type: ignore[override]
        return self.activation(self.norm(x) + residual)


class _Before(_Neighbours):
    """The norm of x + residual, and the sum."""

    passes = 4, 8  # it reads the residual, writes the sum, and reads its gradient

    def forward(self, x: Tensor, residual: Tensor) -> Any:  # type: ignore[override]
        x = x + residual
        return self.norm(x), x


class _Biased(_Neighbours):
    """The norm of x + input_bias, a learned vector as wide as a row."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(norm)
        self.input_bias = nn.Parameter(torch.zeros(norm.normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.input_bias)
        return y

    def in_one_call(self, mode: Any, x: Tensor) -> Tensor:
        return _layer_norm(self.norm, mode, x, input_bias=self.input_bias)


class _Adaptive(_Neighbours):
    """A LayerNorm, then a scale and a shift of each sample; rows alone are one sample."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(nn.LayerNorm(shape[-1], elementwise_affine=False))
        of_samples = torch.zeros(shape[0] if len(shape) > 2 else 1, shape[-1])
        self.scale, self.shift = (nn.Parameter(of_samples.clone()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        sizes = (len(self.scale), *[1] * (x.dim() - 2), x.shape[-1])
        y: Tensor = self.norm(x) * (1 + self.scale.view(sizes)) + self.shift.view(sizes)
        return y

    def in_one_call(self, mode: Any, x: Tensor) -> Tensor:
        return _layer_norm(self.norm, mode, x, scale=self.scale, shift=self.shift)


class _Gated(_Neighbours):
    """An RMSNorm, times silu(gate): after the norm, or before it if `first`."""

    passes = 3, 8  # it reads the gate twice, and writes its gradient

    def __init__(self, norm: nn.RMSNorm, first: bool) -> None:
        super().__init__(norm)
        self.first = first

    def forward(self, x: Tensor, gate: Tensor) -> Any:  # type: ignore[override]
        if self.first:
            return self.norm(x * F.silu(gate))
        return self.norm(x) * F.silu(gate)

    def in_one_call(self, mode: Any, x: Tensor, gate: Tensor) -> Tensor:
        norm: Any = self.norm
        options: Any = {"mode": mode, "gate": gate, "gate_first": self.first}
        function = normplug.functional.rms_norm
        return function(x, norm.normalized_shape, norm.weight, norm.eps, **options)


def _layer_norm(norm: Any, mode: Any, x: Tensor, **vectors: Any) -> Tensor:
    affine = (norm.weight, norm.bias, norm.eps)
    function = normplug.functional.layer_norm
    return function(x, norm.normalized_shape, *affine, mode=mode, **vectors)


class _OneCall(nn.Module):
    """What a stock module computes, in one call of normplug."""

    def __init__(self, stock: Any, mode: Any) -> None:
        super().__init__()
        self.stock = stock
        self.mode = mode

    def forward(self, *inputs: Tensor) -> Any:
        return self.stock.in_one_call(self.mode, *inputs)


def _of_images(name: str, shape: Sequence[int], **how: Any) -> nn.Module:
    return getattr(nn, f"{name}{max(len(shape) - 2, 1)}d")(shape[1], **how)


_batch_norm = partial(_of_images, "BatchNorm")
# An operation -> the stock layer for an input of this shape.
OPS: dict[str, Callable[[Sequence[int]], nn.Module]] = {
    "layer_norm": lambda shape: nn.LayerNorm(shape[-1]),
    "add_layer_norm": lambda shape: _Before(nn.LayerNorm(shape[-1])),
    "add_bias_layer_norm": lambda shape: _Biased(nn.LayerNorm(shape[-1])),
    "adaptive_layer_norm": _Adaptive,
    "rms_norm": lambda shape: nn.RMSNorm(shape[-1]),
    "rms_norm_gate": lambda shape: _Gated(nn.RMSNorm(shape[-1]), False),
    "gate_rms_norm": lambda shape: _Gated(nn.RMSNorm(shape[-1]), True),
    "add_rms_norm": lambda shape: _Before(nn.RMSNorm(shape[-1])),
    "batch_norm": _batch_norm,
    "batch_norm_relu": lambda shape: _Neighbours(
        _batch_norm(shape), nn.ReLU(inplace=True)
    ),
    "batch_norm_add_relu": lambda shape: _After(
        _batch_norm(shape), nn.ReLU(inplace=True)
    ),
    "group_norm": lambda shape: nn.GroupNorm(math.gcd(32, shape[1]), shape[1]),
    "group_norm_silu": lambda shape: _Neighbours(OPS["group_norm"](shape), nn.SiLU()),
    "instance_norm": partial(_of_images, "InstanceNorm", affine=True),
}
# Operations on rows.
ROWS = (
    "layer_norm", "add_layer_norm", "add_bias_layer_norm", "adaptive_layer_norm", "rms_norm",
    "add_rms_norm", "rms_norm_gate", "gate_rms_norm",
)  # fmt: skip
# Of images with 0, 1, or more dimensions of space.
_LAYOUTS = (["NC"], ["NCHW"], ["NCHW", "NHWC"])


def ours(layer: nn.Module, mode: Any = "standard", watched: bool = False) -> nn.Module:
    """Swap a layer, and fuse the operations next to its norm; `watched` adds statistics.

    What `fuse` has no rule for becomes arguments of the function.
    """
    if isinstance(layer, (_Biased, _Adaptive, _Gated)):
        return _OneCall(layer, mode)
    swapped = normplug.swap(
        layer, mode, track_running_stats=watched, preserve_output=False
    )
    return normplug.fuse(swapped) if isinstance(layer, _Neighbours) else swapped


# Provider -> what it does to a stock layer.
PROVIDERS: dict[str, Change] = {
    OURS: ours,
    EAGER: lambda layer: layer,
    COMPILED: lambda layer: torch.compile(layer, fullgraph=True, dynamic=False),
}


class Case(NamedTuple):
    """An operation of `OPS` on one input."""

    op: str
    layout: str
    shape: tuple[int, ...]
    dtype: str

    def facts(self) -> dict[str, str]:
        """Its fields as text."""
        return self._asdict() | {"shape": "x".join(map(str, self.shape))}

    def __str__(self) -> str:
        return " ".join(self.facts().values())


def cases(
    ops: Iterable[str], shapes: Iterable[tuple[int, ...]], dtypes: Iterable[str]
) -> list[Case]:
    """Every operation on every shape, in each of its layouts and each dtype.

    "NCHW" are contiguous images with any number of spatial dimensions, "NHWC" channels_last ones.
    """
    return [
        Case(op, layout, shape, dtype)
        for op, shape, dtype in itertools.product(ops, shapes, dtypes)
        for layout in (["rows"] if op in ROWS else _LAYOUTS[min(len(shape), 4) - 2])
    ]


class Problem:
    """A stock layer, random inputs with a mean away from 0, and the gradients of its outputs."""

    def __init__(
        self, case: Case, device: torch.device, eps: float | None = None
    ) -> None:
        self.case = case
        dtype: torch.dtype = getattr(torch, case.dtype)
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)

        def image() -> Tensor:
            x = normal(case.shape, dtype=dtype)
            last = {4: torch.channels_last, 5: torch.channels_last_3d}
            return (
                x.contiguous(memory_format=last[x.dim()]) if case.layout == "NHWC" else x
            )

        self.layer = OPS[case.op](case.shape)
        norm: Any = getattr(self.layer, "norm", self.layer)
        usual = 1e-6 if isinstance(norm, nn.RMSNorm) else 1e-5
        self.eps = norm.eps = usual if eps is None else eps
        # BatchNorm's parameters are float32 for half-precision input, as they are under autocast.
        is_batch_norm = isinstance(norm, BatchNormBase)
        self.layer.to(device, accumulator_dtype(dtype) if is_batch_norm else dtype)
        for name, parameter in self.layer.named_parameters():
            drawn = normal(parameter.shape, dtype=parameter.dtype)
            parameter.data = drawn.abs_().add_(0.5) if name.endswith("weight") else drawn
        has_other = isinstance(self.layer, (_Before, _After, _Gated))
        self.inputs = [image().mul_(2).add_(3), *([image()] if has_other else [])]
        self.gradients = [
            image() for _ in range(2 if isinstance(self.layer, _Before) else 1)
        ]
        # No gradient depends on how the sign of a ReLU's input is rounded.
        if isinstance(getattr(self.layer, "activation", None), nn.ReLU):
            exact: Any = copy.deepcopy(self.layer).double()
            exact.activation = nn.Identity()
            y = exact(*(each.double() for each in self.inputs))
            self.gradients[0].masked_fill_(y.abs() < torch.finfo(dtype).eps ** 0.5, 0)
        for tensor in self.inputs:
            tensor.requires_grad_()
        self.stock = self.results(copy.deepcopy(self.layer))
        self.exact = self.results(copy.deepcopy(self.layer).double(), torch.float64)

    def calls(self, layer: nn.Module) -> dict[str, Callable[[], Any]]:
        """Direction ("F", "F+B") -> a call of `layer` as in a training step."""
        leaves = [*self.inputs, *layer.parameters()]
        forward = partial(layer, *self.inputs)
        return {"F": forward, "F+B": lambda: grad(forward(), leaves, self.gradients)}

    def results(self, layer: nn.Module, dtype: torch.dtype | None = None) -> Tensors:
        """The layer's outputs, the gradients, and its updated statistics, computed in a dtype."""
        dtype = dtype or self.inputs[0].dtype
        inputs = [each.detach().to(dtype).requires_grad_() for each in self.inputs]
        made = layer(*inputs)
        outputs = [made] if isinstance(made, Tensor) else made
        gradients = [each.to(dtype) for each in self.gradients]
        found = grad(outputs, [*inputs, *layer.parameters()], gradients)
        names = ["x", "residual"][: len(inputs)]
        names += [name for name, _ in self.layer.named_parameters()]
        buffers = [name for name, _ in self.layer.named_buffers()]
        results = {}
        for name, output in zip(("y", "sum"), outputs, strict=False):
            results[name] = output.detach()
        for name, gradient in zip(names, found, strict=True):
            results[f"d{name}"] = gradient
        for name, buffer in zip(buffers, layer.buffers(), strict=False):
            results[name] = buffer.clone()
        return results

    def check(self, who: str, layer: nn.Module) -> Tensors:
        """The results of a layer; an AssertionError if one is less accurate than `bound` allows."""
        found = self.results(layer)
        for key, value in self.stock.items():
            theirs = error(value, self.exact[key])
            wrong = error(found[key], self.exact[key])
            allowed = bound(theirs, value.dtype)
            if not wrong <= allowed:  # or NaN
                raise AssertionError(
                    f"normplug.bench: {who}, {self.case}: {key} is wrong: its relative error to "
                    f"float64 is {wrong:.3g}, above {allowed:.3g} (torch has {theirs:.3g})."
                )
        return found


def measure_op(
    case: Case,
    device: torch.device,
    *,
    eps: float | None = None,
    providers: Mapping[str, Change] = PROVIDERS,
) -> Rows:
    """A row for each direction and provider, by default normplug, eager and torch.compile.

    A wrong result of normplug is an AssertionError; another provider that fails is left out.
    """
    gc.collect()  # the tensors of an earlier case
    torch.compiler.reset()  # earlier cases count towards the recompilation limit
    copied = timing.copy_gbps(device)
    problem = Problem(case, device, eps)
    gpu = device.type == "cuda"
    stopwatch = timing.stopwatch(device)
    layers: dict[str, nn.Module] = {}
    results: dict[str, Tensors] = {}
    for name, change in providers.items():
        layer = change(copy.deepcopy(problem.layer))
        check = problem.results if name == COMPILED else partial(problem.check, name)
        test = partial(check, layer)
        found = test() if name == OURS else timing.attempt(f"{case}: {name}", test)
        if found is not None:
            layers[name], results[name] = layer, found
    facts = {
        **case.facts(),
        "eps": problem.eps,
        "mode": "standard",
        **stamp(gpu, *RIVALS),
    }
    rows = []
    floors = getattr(problem.layer, "passes", _Neighbours.passes)
    for direction, passes in zip(("F", "F+B"), floors, strict=True):
        turns = {
            name: stopwatch(problem.calls(layer)[direction])
            for name, layer in layers.items()
        }
        for name, timed in timing.in_turns("us", turns).items():
            row = {**facts, "direction": direction, "provider": name}
            row |= {"floor_passes": passes, **timed}
            gbps = passes * problem.inputs[0].nbytes / row["us"] / 1e3
            row["gbps"] = gbps
            row["copy_gbps"] = copied
            row["percent_of_copy"] = 100 * gbps / copied
            keys = set(problem.stock) if direction == "F+B" else {"y", "sum"}
            if name != EAGER:
                row |= differences(results[name], problem.stock, keys)
            exact = differences(results[name], problem.exact, keys)
            row |= {f"{field}_f64": value for field, value in exact.items()}
            rows.append(row)
    return Rows(rows, COLUMNS, [ORIGIN.format(**rows[0])])


def bound(theirs: float, dtype: torch.dtype) -> float:
    """The largest relative error to allow: twice torch's, plus half a rounding to the dtype."""
    if not dtype.is_floating_point:
        return 0.0
    # With few channels, `theirs` may be tiny.
    sums = torch.finfo(accumulator_dtype(dtype)).eps
    return 2.0 * theirs + 0.5 * torch.finfo(dtype).eps + ROUNDINGS_OF_SUMS * sums


def error(value: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm; absolute if the truth is zero."""
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / (truth.norm() or 1.0))


def differences(found: Tensors, truth: Tensors, keys: set[str]) -> dict[str, float]:
    """The largest difference of a result, absolute and relative to its largest element."""
    pairs = [(found[key].double(), truth[key].double()) for key in keys & set(found)]
    away = torch.stack([(value - exact).abs().max() for value, exact in pairs])
    size = torch.stack([exact.abs().max() for _, exact in pairs])
    relative = away / torch.where(size > 0, size, 1)
    # The maximum of values of which one is nan is nan.
    return {"max_abs": away.max().item(), "max_rel": relative.max().item()}
