"""Operators of `torch.library`, at the least host time that they can be had for.

`torch.library.custom_op` puts Python of its own before each call, and more where an operator has
gradients, in all twice the time that dispatching it takes. Here an operator is a kernel, and what
compilers are told of its results. Gradients are an `autograd.Function`'s around it, and that is the
kernel of a second operator, a composite one: a compiler that sees it asks for its parts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("normplug", "FRAGMENT")


def operator(name: str, changes: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator, which it is replaced by.

    Args:
        name: of the operator, in the namespace "normplug".
        changes: the arguments that it changes in place, and does not return.
    """

    def define(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=changes)
        return _define(name, schema, function, "CompositeExplicitAutograd")

    return define


def differentiable(name: str, forward: Any, function: type[torch.autograd.Function]) -> Any:
    """Make an operator of a Function, which a compiler takes apart, and so has its gradients.

    Args:
        name: of the operator, in the namespace "normplug".
        forward: the operator that the Function calls, with its own arguments, and whose results it
            gives.
        function: the Function.
    """
    schema = str(forward._schema)
    return _define(name, schema[schema.index("(") :], function.apply, "CompositeImplicitAutograd")


def _define(name: str, schema: str, function: Callable[..., Any], key: str) -> Any:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, key)
    return getattr(torch.ops.normplug, name).default


def fake(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the operator's fake (meta) implementation."""
    return torch.library.register_fake(operator._name, lib=_library)
