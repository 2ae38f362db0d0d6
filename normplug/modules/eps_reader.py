"""A guard on `eps` that refuses code which would silently drop a layer's target variance.

Tools that fold, rebuild or recompute a norm (`convert_sync_batchnorm`, `fuse_conv_bn_eval`, timm's
`reparameterize_model`, a forward that passes a norm's tensors to `F.layer_norm`) would scale every
output of the layer by 1/sqrt(tv). They call none of its methods, but all of them read `eps` and
other names of the formula. So `eps` of a normplug layer is a property that inspects the code that
reads it. normplug's own forwards read `_eps`, which has no guard. `normplug.check` finds what the
guard cannot see, such as a tool with an eps of its own.
"""

from __future__ import annotations

import inspect
import math
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

# Code that computes with `eps` names one of these.
_FORMULA = frozenset(
    {
        "weight",
        "running_var",
        "normalized_shape",
        "batch_norm",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "rms_norm",
        "sqrt",
        "rsqrt",
    }  # fmt: skip
)
# Parts of a function that run in frames of their own (comprehensions: up to Python 3.11).
_INNER = frozenset({"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_FUSED_INFERENCE = "_transformer_encoder_layer_fwd"
_NO_NUMBER = complex(math.nan)


def eps_to_reader(layer: Any, eps: str) -> Any:
    """The value of `layer.eps` for the code that reads it, if the target variance is not 1.

    eps: the name of the attribute that is read.

    There are three cases. Code that does not compute with eps, or that knows of the target
    variance, gets the eps itself. `nn.TransformerEncoderLayer` gets nan: in eval under no_grad it
    passes its norms' tensors to one fused operator if their eps are equal; nan equals nothing, so
    it calls the norms. Dynamo, which has no frames to inspect, gets a complex nan: it equals
    nothing either, and every norm function rejects it.

    Raises:
        RuntimeError: the code folds, rebuilds or recomputes the norm.
    """
    if torch.compiler.is_dynamo_compiling():
        return _NO_NUMBER
    frame: FrameType | None = sys._getframe(2)  # past this function and the property
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
    name_is_passed = eps not in names and eps in caller  # as to `getattr(layer, name)`
    if name_is_passed or (not names & _FORMULA and "running_var" in caller):
        names |= caller  # the reader is a helper of its caller, which computes
    computes = eps in names and names & _FORMULA
    if not computes or "target_variance" in names or _is_method(layer, frame.f_code):
        return layer._eps
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11
    name = name.replace(".<locals>", "")
    raise RuntimeError(
        f"normplug: {frame.f_globals.get('__name__')}.{name} would drop the target variance of a "
        f"{type(layer).__name__} in mode {layer.mode}: it reads {eps} to fold, rebuild or "
        "recompute the layer. Use it before normplug.swap(model), or call normplug.unswap(model) "
        "first: the outputs stay the same. Code that reads target_variance too is let through."
    )


def _names(code: CodeType) -> set[str]:
    """Names and strings in the code of a function, its comprehensions and its lambdas."""
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
    """Whether the code is a method of the layer's own class, which may read any attribute."""
    functions = (vars(cls).get(code.co_name) for cls in type(layer).__mro__)
    return any(
        getattr(inspect.unwrap(f), "__code__", None) is code for f in functions if callable(f)
    )
