"""RMSNorms of other libraries, recognised by what their forward computes.

`transformers` and `diffusers` have hundreds of classes for one formula, which differ in where they
round. `probe_rms_norm` runs the forward of a class on small inputs of every dtype, and takes the
class if exactly one of normplug's RMSNorms gives the same bits and dtypes. So a class that a new
version of a library adds is taken too, and one whose forward has changed is left.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from normplug.modules.base import eps_property
from normplug.modules.row_norms import _RMSNorm
from normplug.modules.table import UNKNOWN

# The attributes in which libraries store eps, each with another value in a probe: the result shows
# which of them the forward reads.
_EPS = {"variance_epsilon": 0.25, "eps": 0.5, "epsilon": 0.75}
# Options that a forward may read from its instance, each with its value in a probe.
_OPTIONS: dict[str, Any] = {
    "bias": None,
    "with_scale": True,
    "elementwise_affine": True,
    "group_size": None,
}
# (input dtype, weight dtype): for these, kinds of rounding differ in the result's bits or dtype.
_DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
_WIDTH = 24
_Inputs: TypeAlias = list[tuple[Tensor, Tensor | None]]  # x and weight
_Kind: TypeAlias = tuple[str, float, str]  # name of eps, weight offset, rounding


class LibraryRMSNorm(_RMSNorm):
    """An RMSNorm of another library, whose weight gives the shape of a row."""

    _autocasts = False  # autocast leaves the operations of these classes alone
    # Whether the library's forward takes a weight of None.
    _may_lack_weight: ClassVar[bool] = False
    # The library `kernels`, which transformers may use, calls this before it replaces a forward.
    kernel_condition = staticmethod(lambda module: False)

    @classmethod
    def _refusal(cls, module: nn.Module) -> str | None:
        own = {**vars(module), **module._parameters}
        weight: Tensor | None = getattr(module, "weight", None)
        if weight is None and not (
            "weight" in own and cls._may_lack_weight and "dim" in own
        ):
            return "it has no weight, into which unswap could fold the target variance"
        if weight is not None and len(weight.shape) != 1:
            return f"its weight has {len(weight.shape)} dimensions, and its rows have one"
        for name in ("bias", "with_scale", "group_size"):
            if own.get(name, _OPTIONS[name]) is not _OPTIONS[name]:
                return f"it has a {name}, and normplug's RMSNorm has none"
        return None

    def _affine_shape(self) -> tuple[int, ...]:
        weight: Tensor | None = self.weight  # type: ignore[assignment]
        return tuple(self.dim if weight is None else weight.shape)  # type: ignore[arg-type]


@torch.no_grad()
def probe_rms_norm(
    cls: type[nn.Module],
) -> tuple[type[LibraryRMSNorm], dict[str, Any]] | str:
    """The base and the attributes of a class's normplug class, or why there is none.

    The probe does not call the constructor, which may therefore take any arguments.
    """
    parameters = inspect.signature(cls.forward).parameters.values()
    if len(parameters) != 2 or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return UNKNOWN
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        inputs = list(_inputs())
        outputs = [_forward(cls, x, weight) for x, weight in inputs]
        kinds = product(_EPS, (0.0, 1.0), ("output", "input", "weight"))
        found = [kind for kind in kinds if _computes(kind, inputs, outputs)]
        if len(found) != 1:
            return UNKNOWN
        eps_name, weight_offset, rounding = found[0]
        bare: _Inputs = [(x, None) for x, _ in inputs]
        try:
            outputs = [_forward(cls, x, None) for x, _ in bare]
            may_lack_weight = _computes(found[0], bare, outputs)
        except (TypeError, AttributeError):
            may_lack_weight = False
    declarations = {
        "_eps_name": eps_name,
        eps_name: eps_property(eps_name),
        "_weight_offset": weight_offset,
        "_rounding": rounding,
        "_may_lack_weight": may_lack_weight,
    }
    return LibraryRMSNorm, declarations


def _inputs() -> Iterator[tuple[Tensor, Tensor | None]]:
    """Input and weight in each pair of dtypes; the input's mean is far from 0."""
    generator = torch.Generator("cpu").manual_seed(0)
    for of_x, of_weight in _DTYPES:
        x = 3 + torch.randn(2, 16, _WIDTH, generator=generator, dtype=torch.float32)
        weight = torch.randn(_WIDTH, generator=generator, dtype=torch.float32)
        yield x.to(of_x), weight.to(of_weight)


def _forward(cls: type[nn.Module], x: Tensor, weight: Tensor | None) -> Tensor:
    """Run a class's forward on x, with a weight and the attributes of a probe."""
    layer = object.__new__(cls)
    nn.Module.__init__(layer)
    vars(layer).update(_EPS | _OPTIONS)
    layer.register_parameter(
        "weight", None if weight is None else nn.Parameter(weight.clone())
    )
    y: Tensor = cls.forward(layer, x.clone())
    return y


def _computes(kind: _Kind, inputs: _Inputs, outputs: list[Tensor]) -> bool:
    """Whether normplug's RMSNorm of this kind gives these outputs."""
    eps, numbers = _EPS[kind[0]], kind[1:]
    spec = LayerNormSpec((_WIDTH,), None, eps, 1.0, None, "float32", False, *numbers)
    for (x, weight), theirs in zip(inputs, outputs, strict=True):
        ours = spec.by_formula(x, Tensors(x, None, weight))[0]
        if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
            return False
        # In float64, these libraries compute the root in float32.
        rounding = 1e-6 if ours.dtype == torch.float64 else 0.0
        if not torch.allclose(theirs, ours, rtol=rounding, atol=rounding):
            return False
    return True
