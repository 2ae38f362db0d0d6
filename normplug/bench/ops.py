"""The operations that `op` and `sweep` measure: normplug's call, and the same work in torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from normplug import functional, target_variance
from normplug.reference import accumulator_dtype

MOMENTUM = 0.1

Function = Callable[..., Any]  # takes an operation's tensors by name, and eps
Tensors = dict[str, Tensor]

# The arguments of a norm next to its tensors and eps, which are the same in torch and in normplug.
_ARGUMENTS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "layer_norm": lambda x: {"normalized_shape": x.shape[-1:]},
    "rms_norm": lambda x: {"normalized_shape": x.shape[-1:]},
    "group_norm": lambda x: {"num_groups": groups(x.shape)},
    "instance_norm": lambda x: {"use_input_stats": True, "momentum": MOMENTUM},
    "batch_norm": lambda x: {"training": True, "momentum": MOMENTUM},
}


def groups(shape: Sequence[int]) -> int:
    """The number of a GroupNorm's groups: 32, or fewer if they cannot divide the channels."""
    return math.gcd(32, shape[1])


# What is added -> the fewest passes over the input: of the forward, and also of the backward.
# Forward reads x and writes y, backward reads dy and x and writes dx. A residual adds a read, and
# its gradient a write. The sum, if it is returned, adds a write, and its gradient a read.
PASSES = {"": (2, 5), "bias": (2, 5), "after": (3, 7), "before": (4, 8)}


@dataclass(frozen=True)
class Op:
    """A norm of `torch.nn.functional` and of `normplug.functional`, and the operations next to it.

    `add` is "before" for the norm of x + residual, which is returned too; "after" for a residual
    that is added to the norm's result; "bias" for a bias that is added to x.
    """

    norm: str
    add: str = ""
    activation: str | None = None
    statistics: bool = False

    @property
    def of_rows(self) -> bool:
        """Whether it normalises rows, and not channels or groups of channels."""
        return self.norm in ("layer_norm", "rms_norm")

    def layouts(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The memory layouts of an input of this shape; none if the operation does not take it."""
        if self.of_rows:
            return ("rows",) if len(shape) >= 2 else ()
        features = ("NC",) if self.norm == "batch_norm" else ()
        images = ("NCHW", "NHWC")
        return {2: features, 3: images[:1], 4: images, 5: images}.get(len(shape), ())

    def ours(self, x: Tensor, eps: float, **t: Any) -> Any:
        """The call of normplug; takes `mode` and `backend`, too."""
        if self.activation is not None:
            t["activation"] = self.activation
        name = f"add_{self.norm}" if self.add == "before" else self.norm
        return getattr(functional, name)(x, eps=eps, **_ARGUMENTS[self.norm](x), **t)

    def theirs(self, x: Tensor, eps: float, norm: Function | None = None, **t: Any) -> Any:
        """The same work as separate calls of torch, or of another `norm`, as layers make them."""
        if self.add in ("before", "bias"):
            x = x + t["residual" if self.add == "before" else "input_bias"]
        if self.statistics:
            t["num_batches_tracked"].add_(1)
        names = ["weight", "bias"]
        if self.norm == "batch_norm":
            names += ["running_mean", "running_var"]
        elif self.statistics:  # torch's own norms of rows have no running statistics
            with torch.no_grad():
                var, mean = torch.var_mean(x, -1, correction=0)
                for running, new in ((t["running_mean"], mean), (t["running_var"], var)):
                    running.lerp_(new.mean(dtype=running.dtype), MOMENTUM)
        norm = norm or getattr(F, self.norm)
        tensors = {name: t[name] for name in names if name in t}
        y = norm(x, eps=eps, **_ARGUMENTS[self.norm](x), **tensors)
        if self.add == "after":
            y += t["residual"]
        if self.activation is not None:
            y = torch.relu_(y) if self.activation == "relu" else F.silu(y)
        return (y, x) if self.add == "before" else y


OPS = {
    "layer_norm": Op("layer_norm"),
    "layer_norm_stats": Op("layer_norm", statistics=True),
    "add_layer_norm": Op("layer_norm", "before"),
    "bias_layer_norm": Op("layer_norm", "bias"),
    "rms_norm": Op("rms_norm"),
    "add_rms_norm": Op("rms_norm", "before"),
    "batch_norm": Op("batch_norm", statistics=True),
    "batch_norm_relu": Op("batch_norm", activation="relu", statistics=True),
    "batch_norm_add_relu": Op("batch_norm", "after", "relu", statistics=True),
    "group_norm": Op("group_norm"),
    "group_norm_silu": Op("group_norm", activation="silu"),
    "instance_norm": Op("instance_norm"),
}


class Case(NamedTuple):
    """An operation of `OPS` on one input.

    The layout is "NHWC" for channels_last with any number of spatial dimensions, "NCHW" for
    contiguous images, "NC" for features, and "rows" for norms of rows.
    """

    op: str
    layout: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.layout} {'x'.join(map(str, self.shape))} {self.dtype}"


def cases(
    ops: Sequence[str],
    shapes: Iterable[tuple[int, ...]],
    dtypes: Iterable[str],
    layouts: Sequence[str] = ("rows", "NC", "NCHW", "NHWC"),
) -> list[Case]:
    """Every operation on every shape, in each of its layouts that is in `layouts`, and each dtype.

    Raises:
        ValueError: an operation does not take a shape.
    """
    found = []
    for name, shape in itertools.product(ops, shapes):
        own = OPS[name].layouts(shape)
        if not own:
            takes = "(*rows, width)" if OPS[name].of_rows else "(N, C, *space)"
            sizes = "x".join(map(str, shape))
            raise ValueError(f"{name} takes no {takes} of {len(shape)} dimensions; got {sizes}.")
        chosen = [layout for layout in own if layout in layouts]
        found += [Case(name, layout, shape, dtype) for layout in chosen for dtype in dtypes]
    return found


class Problem:
    """The tensors of a case: random, the same in each process, with a mean away from 0.

    `leaves` get a gradient, a call updates `state` in place, and `gradients` are of the outputs.
    """

    def __init__(self, case: Case, device: torch.device, eps: float | None = None) -> None:
        self.op = op = OPS[case.op]
        usual = 1e-6 if op.norm == "rms_norm" else 1e-5
        self.eps = usual if eps is None else eps
        dtype: torch.dtype = getattr(torch, case.dtype)
        wide = accumulator_dtype(dtype)
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)

        def image() -> Tensor:
            x = normal(case.shape, dtype=dtype)
            last = {4: torch.channels_last, 5: torch.channels_last_3d}
            return x.contiguous(memory_format=last[x.dim()]) if case.layout == "NHWC" else x

        features = case.shape[-1 if op.of_rows else 1]
        # BatchNorm's parameters are float32 for half-precision input, as they are under autocast.
        vector = partial(normal, features, dtype=wide if op.norm == "batch_norm" else dtype)
        self.leaves = {"x": image().mul_(2).add_(3), "weight": vector().abs_().add_(0.5)}
        if op.norm != "rms_norm":
            self.leaves["bias"] = vector()
        if op.add:
            name = "input_bias" if op.add == "bias" else "residual"
            self.leaves[name] = vector() if op.add == "bias" else image()
        self.state: Tensors = {}
        if op.statistics:
            size = () if op.of_rows else (features,)
            self.state = {
                "running_mean": torch.zeros(size, dtype=wide, device=device),
                "running_var": torch.ones(size, dtype=wide, device=device),
                "num_batches_tracked": torch.zeros((), dtype=torch.long, device=device),
            }
        self.gradients = [image() for _ in range(2 if op.add == "before" else 1)]
        if op.activation == "relu":
            self._mask_undecided_signs()
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def calls(self, function: Function) -> dict[str, Callable[[], Any]]:
        """Direction ("F", "F+B") -> a call of `function` as in a training step."""
        forward = partial(function, **self.leaves, **self.state, eps=self.eps)
        leaves = tuple(self.leaves.values())
        return {"F": forward, "F+B": lambda: grad(forward(), leaves, self.gradients)}

    def results(self, function: Function) -> Tensors:
        """Outputs, gradients and updated statistics of `function`; the state stays as it is."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        made = function(**self.leaves, **state, eps=self.eps)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        found = grad(outputs, list(self.leaves.values()), self.gradients)
        return {
            **dict(zip(("y", "sum"), (output.detach() for output in outputs), strict=False)),
            **{f"d{name}": each for name, each in zip(self.leaves, found, strict=True)},
            **state,
        }

    def truth(self, mode: Any = "standard") -> Tensors:
        """The same of torch in float64, where the target variance scales the weight."""
        twin, scale = copy.copy(self), target_variance(mode) ** 0.5
        twin.leaves = {k: v.detach().double().requires_grad_() for k, v in self.leaves.items()}
        twin.state = {k: v.double() if v.is_floating_point() else v for k, v in self.state.items()}
        twin.gradients = [gradient.double() for gradient in self.gradients]
        return twin.results(lambda weight, **t: self.op.theirs(weight=weight * scale, **t))

    def _mask_undecided_signs(self) -> None:
        """Clear dy where rounding may decide the sign of a ReLU's input.

        All implementations then have the same gradients.
        """
        (dy,) = self.gradients
        margin = math.sqrt(torch.finfo(dy.dtype).eps)  # far above any rounding of the input
        twin = copy.copy(self)
        twin.op = replace(self.op, activation=None)
        for mode in ("standard", "golden"):
            dy.masked_fill_(twin.truth(mode)["y"].abs() < margin, 0)
