"""The scale and the shift of an adaptive norm, as they are written in a forward.

    self.norm(x) * (1 + scale[:, None]) + shift[:, None]
    modulate(self.norm(x), shift, scale)

In the second form, `modulate` is a function that returns an expression of the first form.
"""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from normplug._fuse.calls import modulated_norm, modulates
from normplug._fuse.trace import Untraceable, definition, is_name


class Modulation(NamedTuple):
    """The parts of `normalised * scale + shift`, as expressions. The scale contains the one."""

    normalised: Any
    scale: Any
    shift: Any


def of_expression(node: Any) -> Modulation | None:
    """The parts of an expression; None if it is not a modulation.

    Apart from the normalised value, a modulation reads only variables or views of them. So the norm
    may run after the scale and the shift are evaluated.
    """
    product: Any = node.left if _adds(node) else None
    is_product = isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)
    if not is_product or not _is_scale(product.right) or not is_view(node.right):
        return None
    return Modulation(product.left, product.right, node.right)


def _adds(node: Any) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _is_scale(node: Any) -> bool:
    """Whether an expression is 1 + a view, or a view of that."""
    if _adds(node):
        parts = (node.left, node.right)
        ones = [isinstance(part, ast.Constant) and part.value == 1 for part in parts]
        return any(ones) and is_view(parts[ones.index(False)] if False in ones else None)
    inner = _viewed(node)
    return inner is not None and _is_scale(inner)


def is_view(node: Any) -> bool:
    """Whether an expression is a variable, or a view of one with constant indices."""
    return isinstance(node, ast.Name) or (
        _viewed(node) is not None and is_view(_viewed(node))
    )


def _viewed(node: Any) -> Any:
    """What an expression views, by constant indices or by `unsqueeze`; None if it does not."""
    if isinstance(node, ast.Subscript):
        return node.value if _is_constant(node.slice) else None
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    function = node.func
    is_unsqueeze = isinstance(function, ast.Attribute) and function.attr == "unsqueeze"
    return function.value if is_unsqueeze and _is_constant(node.args[0]) else None  # type: ignore[attr-defined]


def _is_constant(node: ast.AST) -> bool:
    """Whether nothing in an expression is a variable or a call."""
    constant = (ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
    return all(isinstance(part, constant) for part in ast.walk(node))


def norm_then_function(function: Any, norm: Any, x: Tensor, *args: Any) -> Any:
    """Return function(norm(x), *args), in one call if the function is a modulation."""
    if modulates(norm, x):
        parts = of_function(function)
        if parts is not None:
            return modulated_norm(norm, x, *parts(*args))
    return function(norm(x), *args)


def of_function(function: Any) -> Callable[..., Any] | None:
    """A function that computes (scale, shift) from the arguments of `function` after the first.

    None if `function` does more than return a modulation of its first argument.
    """
    if not isinstance(function, types.FunctionType):
        return None
    return _of_code(function, function.__code__)


@functools.cache
def _of_code(
    function: types.FunctionType, code: types.CodeType
) -> Callable[..., Any] | None:
    if hasattr(function, "__wrapped__") or code.co_freevars or function.__defaults__:
        return None
    try:
        written = definition(function)
    except Untraceable:
        return None
    arguments = written.args
    names = [argument.arg for argument in arguments.args]
    only_positional = len(names) == code.co_argcount and not code.co_kwonlyargcount
    *before, last = written.body
    is_document = all(
        isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in before
    )
    if not names or not only_positional or arguments.vararg or arguments.kwarg:
        return None
    if not is_document or not isinstance(last, ast.Return):
        return None
    parts = of_expression(last.value)
    if parts is None or not is_name(parts.normalised, names[:1]):
        return None
    both = ast.Tuple([copy.deepcopy(parts.scale), copy.deepcopy(parts.shift)], ast.Load())
    read = {part.id for part in ast.walk(both) if isinstance(part, ast.Name)}
    if not read <= set(names[1:]):
        return None
    made = ast.Expression(
        ast.Lambda(
            ast.arguments(
                [], [ast.arg(name) for name in names[1:]], None, [], [], None, []
            ),
            both,
        )
    )
    compiled = compile(ast.fix_missing_locations(made), "<normplug.fuse>", "eval")
    compute: Callable[..., Any] = eval(compiled, {"__builtins__": {}})
    return compute
