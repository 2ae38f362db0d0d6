"""The definitions of functions, parsed from their source files."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Collection, Iterable
from typing import Any

# The nodes that have variables of their own.
SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


class Untraceable(Exception):
    """A forward cannot be traced or edited; the message is the reason for the report."""


def definition(function: types.FunctionType) -> ast.FunctionDef:
    """Parse the definition of a function, without its decorators.

    Raises:
        Untraceable: it does not compile to the function's code, as after an edit of the file.
    """
    name = function.__name__
    try:
        lines, first = inspect.getsourcelines(function)
        indented = lines[0][:1].isspace()
        tree = ast.parse("if 1:\n" * indented + "".join(lines))
    except (OSError, TypeError, SyntaxError):
        raise Untraceable(f"the source of its {name} cannot be read") from None
    found = tree.body[0].body[0] if indented else tree.body[0]  # type: ignore[attr-defined]
    if not isinstance(found, ast.FunctionDef):
        raise Untraceable(f"its {name} is not a plain function")
    ast.increment_lineno(found, first - 1 - indented)
    found.decorator_list = []
    if not _compiles_to(function, found):
        raise Untraceable(f"its {name} does not match its source")
    return found


def _compiles_to(function: types.FunctionType, found: ast.FunctionDef) -> bool:
    code = function.__code__
    try:
        # Python compiles `name.function()` differently if the file imports the name. A notebook
        # compiles its imports apart.
        for imported in (_imported(code.co_filename), ()):
            if _same(compiled(function, found, imported=imported), code):
                return True
    except (SyntaxError, StopIteration):
        pass
    return False


def _same(one: Any, other: Any) -> bool:
    """Whether two code objects run the same, wherever they were written; or two constants."""
    if not isinstance(one, types.CodeType) or not isinstance(other, types.CodeType):
        return repr(one) == repr(other)  # 1, 1.0 and True are equal
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    same = all(getattr(one, name) == getattr(other, name) for name in names)
    constants = one.co_consts, other.co_consts
    return same and len(constants[0]) == len(constants[1]) and all(map(_same, *constants))


def compiled(
    function: types.FunctionType,
    found: ast.FunctionDef,
    enclosing: Iterable[str] = (),
    imported: Iterable[str] = (),
) -> types.CodeType:
    """Compile a definition to replace a function's code.

    Args:
        function: the function.
        found: the definition.
        enclosing: enclosing variables that it may use, besides those of the function.
        imported: the names that the file imports.
    """
    code = function.__code__
    imports = "".join(f"import {name}\n" for name in imported)
    around = ast.parse(f"{imports}def around({', '.join((*code.co_freevars, *enclosing))}): pass")
    around.body[-1].body = [found]  # type: ignore[attr-defined]
    made = compile(around, code.co_filename, "exec", dont_inherit=True)
    return _inside(_inside(made, "around"), found.name).replace(co_firstlineno=code.co_firstlineno)


def _inside(code: types.CodeType, name: str) -> types.CodeType:
    """The code of a function that is defined in other code."""
    parts = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return next(c for c in parts if c.co_name == name)


@functools.cache
def _imported(file: str) -> frozenset[str]:
    """The names that a file imports outside its functions and classes."""
    names, waiting = set[str](), list[ast.AST]([ast.parse("".join(linecache.getlines(file)))])
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)
    return frozenset(names - {"*"})


def is_name(node: Any, names: Collection[str]) -> bool:
    """Whether an expression is a variable with one of these names."""
    return isinstance(node, ast.Name) and node.id in names
