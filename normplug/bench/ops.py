"""The operations that `op` and `sweep` measure: normplug's call, and the same work in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from normplug import functional, target_variance
from normplug.reference import accumulator_dtype

GROUPS = 32  # of a GroupNorm; fewer if the channels cannot be divided by it
MOMENTUM = 0.1

Function = Callable[..., Any]  # takes an operation's tensors by name, and eps
Tensors = dict[str, Tensor]


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


# The positional arguments of a norm, which are the same in torch and in normplug.
_ARGUMENTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "layer_norm": lambda x, t, eps: (x, x.shape[-1:], t["weight"], t["bias"], eps),
    "rms_norm": lambda x, t, eps: (x, x.shape[-1:], t["weight"], eps),
    "group_norm": lambda x, t, eps: (x, groups(x), t["weight"], t["bias"], eps),
    "instance_norm": lambda x, t, eps: (
        (x, None, None, t["weight"], t["bias"], True, MOMENTUM, eps)
    ),
    "batch_norm": lambda x, t, eps: (
        (x, t["running_mean"], t["running_var"], t["weight"], t["bias"], True, MOMENTUM, eps)
    ),
}


def groups(x: Tensor) -> int:
    """The number of a GroupNorm's groups for x."""
    return math.gcd(GROUPS, x.shape[1])


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
    def passes(self) -> dict[str, int]:
        """Direction -> the fewest passes over the input: F is forward, F+B also backward.

        Forward reads x and writes y, backward reads dy and x and writes dx. A residual adds a read,
        and its gradient a write. The sum, if it is returned, adds a write, and its gradient a read.
        """
        forward, both = {"before": (4, 8), "after": (3, 7)}.get(self.add, (2, 5))
        return {"F": forward, "F+B": both}

    @property
    def of_rows(self) -> bool:
        """Whether it normalises rows, and not channels or groups of channels."""
        return self.norm in ("layer_norm", "rms_norm")

    @property
    def eps(self) -> float:
        """The usual eps."""
        return 1e-6 if self.norm == "rms_norm" else 1e-5

    def refusal(self, shape: Sequence[int]) -> str | None:
        """Why the operation does not take a shape; None if it does."""
        if self.of_rows:
            return None if len(shape) >= 2 else "takes (*rows, width) of 2 or more dimensions"
        fewest = 2 if self.norm == "batch_norm" else 3
        if not fewest <= len(shape) <= 5:
            return f"takes (N, C, *space) of {fewest} to 5 dimensions"
        statistics = {  # how many means
            "batch_norm": shape[1],
            "group_norm": shape[0] * math.gcd(GROUPS, shape[1]),
            "instance_norm": shape[0] * shape[1],
        }
        averaged = math.prod(shape) // statistics[self.norm]
        return None if averaged > 1 else "needs more than one value to average"

    def layouts(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The memory layouts of an input of this shape."""
        if self.of_rows:
            return ("rows",)
        return {2: ("NC",), 3: ("NCHW",)}.get(len(shape), ("NCHW", "NHWC"))

    def ours(self, x: Tensor, eps: float, **t: Any) -> Any:
        """The call of normplug; takes `mode` and `backend`, too."""
        how = {key: value for key, value in t.items() if key not in ("weight", "bias")}
        if self.norm == "batch_norm":
            how = {k: v for k, v in how.items() if not k.startswith("running_")}
        if self.activation is not None:
            how["activation"] = self.activation
        arguments = _ARGUMENTS[self.norm](x, t, eps)
        if self.add == "before":
            arguments = (x, how.pop("residual"), *arguments[1:])
            return getattr(functional, f"add_{self.norm}")(*arguments, **how)
        return getattr(functional, self.norm)(*arguments, **how)

    def theirs(
        self, x: Tensor, eps: float, norm: Function | None = None, active: bool = True, **t: Any
    ) -> Any:
        """The same work as separate calls of torch, as layers and models make them.

        `norm` replaces torch's function; `active=False` leaves out the activation.
        """
        if self.add in ("before", "bias"):
            x = x + t["residual" if self.add == "before" else "input_bias"]
        if self.statistics:
            self._count(x, t)
        y = getattr(F, self.norm)(*_ARGUMENTS[self.norm](x, t, eps)) if norm is None else norm(x, t)
        if self.add == "after":
            y += t["residual"]
        if self.activation is not None and active:
            y = torch.relu_(y) if self.activation == "relu" else F.silu(y)
        return (y, x) if self.add == "before" else y

    def _count(self, x: Tensor, t: Tensors) -> None:
        t["num_batches_tracked"].add_(1)
        if self.of_rows:  # torch's own norms of rows keep no running statistics
            with torch.no_grad():
                found = torch.var_mean(x, -1, correction=0)
                for running, each in zip((t["running_var"], t["running_mean"]), found, strict=True):
                    running.lerp_(each.mean(dtype=running.dtype), MOMENTUM)


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


class Problem:
    """The tensors of a case: random, the same in each process, with a mean away from 0.

    `leaves` get a gradient, a call updates `state` in place, and `gradients` are of the outputs.
    """

    def __init__(self, case: Case, device: torch.device, eps: float | None = None) -> None:
        self.op = op = OPS[case.op]
        self.eps = op.eps if eps is None else eps
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
        return _results(function, self.leaves, self.state, self.gradients, self.eps)

    def truth(self, mode: Any = "standard") -> Tensors:
        """The same of torch in float64, where the target variance scales the weight."""
        leaves = {name: leaf.requires_grad_() for name, leaf in _doubles(self.leaves).items()}
        function = partial(_scaled, self.op, target_variance(mode) ** 0.5)
        gradients = [gradient.double() for gradient in self.gradients]
        return _results(function, leaves, _doubles(self.state), gradients, self.eps)

    def _mask_undecided_signs(self) -> None:
        """Clear dy where rounding may decide the sign of a ReLU's input.

        All implementations then have the same gradients.
        """
        (dy,) = self.gradients
        margin = math.sqrt(torch.finfo(dy.dtype).eps)  # far above any rounding of the input
        for mode in ("standard", "golden"):
            tensors = _doubles(self.leaves) | _doubles(self.state)
            scale = target_variance(mode) ** 0.5
            pre = _scaled(self.op, scale, **tensors, eps=self.eps, active=False)
            dy.masked_fill_(pre.abs() < margin, 0)


def _scaled(op: Op, scale: float, weight: Tensor, **rest: Any) -> Any:
    return op.theirs(weight=weight * scale, **rest)


def _doubles(tensors: Tensors) -> Tensors:
    """Copies in float64; integers stay as they are."""
    return {
        name: tensor.detach().double() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in tensors.items()
    }


def _results(
    function: Function, leaves: Tensors, state: Tensors, gradients: Sequence[Tensor], eps: float
) -> Tensors:
    state = {name: tensor.clone() for name, tensor in state.items()}
    made = function(**leaves, **state, eps=eps)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    found = grad(outputs, list(leaves.values()), gradients)
    return {
        **dict(zip(("y", "sum"), (output.detach() for output in outputs), strict=False)),
        **{f"d{name}": each for name, each in zip(leaves, found, strict=True)},
        **state,
    }
