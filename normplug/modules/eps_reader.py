"""What keeps code that knows of no target variance from dropping one without a word.

Such code asks a layer for nothing but attributes. But to fold, rebuild or recompute a norm it needs
`eps`, and so it names what stands beside eps in the formula. So `eps` of a normplug layer is a
property, which looks at the code that reads it.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

# One of these is named by code that reads `eps` in order to compute with it.
_FORMULA = frozenset(
    {"weight", "running_var", "normalized_shape", "batch_norm", "layer_norm", "sqrt", "rsqrt"}
)
# Code that runs in a frame of its own inside a function.
_INNER = frozenset({"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_FUSED_INFERENCE = "_transformer_encoder_layer_fwd"
_NO_NUMBER = complex(math.nan)


def eps_to_reader(layer: Any) -> Any:
    """What `layer.eps` is to the code that reads it, where the target variance is not 1.

    `nn.TransformerEncoderLayer` passes its norms' tensors to one fused operator in eval under
    no_grad, if their eps are equal. nan never is, so it calls the norms instead. Dynamo has no
    frames to look at. There eps is a complex nan: unequal too, and refused by every norm function.

    Raises:
        RuntimeError: where that code folds, rebuilds or recomputes the norm.
    """
    if torch.compiler.is_dynamo_compiling():
        return _NO_NUMBER
    frame: FrameType | None = sys._getframe(2)
    names = set[str]()
    while True:
        assert frame is not None
        names |= _names(frame.f_code)
        if frame.f_code.co_name not in _INNER or frame.f_back is None:
            break
        frame = frame.f_back
    if _FUSED_INFERENCE in names:
        return math.nan
    caller = set[str]() if frame.f_back is None else _names(frame.f_back.f_code)
    told_what_to_read = "eps" not in names and "eps" in caller
    if told_what_to_read or (not names & _FORMULA and "running_var" in caller):
        names |= caller  # the reader is a helper of the code that computes
    computes = "eps" in names and names & _FORMULA
    if not computes or "target_variance" in names or _is_method(layer, frame.f_code):
        return layer._eps
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11
    name = name.replace(".<locals>", "")
    raise RuntimeError(
        f"normplug: {frame.f_globals.get('__name__')}.{name} would drop the target variance of a "
        f"{type(layer).__name__} in mode {layer.mode}: it reads eps to fold, rebuild or recompute "
        "the layer. Use it before normplug.swap(model), or call normplug.unswap(model) first: the "
        "outputs stay the same. Code that reads target_variance too is let through."
    )


def _names(code: CodeType) -> set[str]:
    """Names and strings in a function's code, with its comprehensions and lambdas."""
    found = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    constants = list(code.co_consts)
    while constants:
        constant = constants.pop()
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            constants += constant
        elif isinstance(constant, CodeType) and constant.co_name in _INNER:
            found |= _names(constant)
    return found


def _is_method(layer: nn.Module, code: CodeType) -> bool:
    """Whether the code is a method of the layer's class, which computes what it is meant to."""
    functions = (vars(cls).get(code.co_name) for cls in type(layer).__mro__)
    return any(
        getattr(inspect.unwrap(f), "__code__", None) is code for f in functions if callable(f)
    )


def tell_opacus(ours: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Have Opacus judge and mend normplug's layers as it does torch's, where it is in use.

    It goes by exact type, so that a BatchNorm of another class counts as private. A LayerNorm's
    running statistics are not private, and are what its `fix` removes.

    Args:
        ours: the normplug class of each torch class.
    """
    opacus = sys.modules.get("opacus.validators")
    if opacus is None:
        return
    validators, fixers = opacus.ModuleValidator.VALIDATORS, opacus.ModuleValidator.FIXERS
    for stock, cls in ours.items():
        for known in (validators, fixers):
            if stock in known:
                known.setdefault(cls, known[stock])
        if issubclass(cls, nn.LayerNorm):
            fixers.setdefault(cls, _without_statistics)


def _without_statistics(layer: Any, **options: Any) -> Any:
    layer.track_running_stats = False
    layer.register_statistics()
    return layer
