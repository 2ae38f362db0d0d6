"""Trace a forward into a torch.fx graph, if its source shows that this is safe.

torch.fx runs a forward on proxies and records the operations. Whatever Python evaluates meanwhile
is frozen into the graph: an attribute, a global, a random number, an `isinstance`. So the source is
read first. A forward is traced only if it is known to depend on nothing but its inputs, the
module's own attributes, and which children the modules have. All of these are recorded, and checked
at each call.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import get_overridable_functions

from normplug._convert import unfused_class
from normplug._fuse.calls import add_in_place
from normplug._torch import traceable_assert

_log = logging.getLogger("normplug.fuse")
# The nodes that have variables of their own.
SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
_STATEMENTS = (
    ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.If, ast.For, ast.Pass,
    ast.Assert, ast.Raise,
)  # fmt: skip
_EXPRESSIONS = (
    ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp,
    ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred,
)  # fmt: skip
_LOOPS = (enumerate, zip, reversed)
# `bool`, `int`, `float` and `len` of a proxy raise an error.
_BUILTINS = (range, tuple, list, bool, int, float, len, *_LOOPS)
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.Size)
# Containers that a forward may iterate over or index; subclasses may define that differently.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# If a class defines one of these, the source of its forward does not tell what the forward does.
_OF_ALL_MODULES = ("__call__", "__getattr__", "__getattribute__", "__del__")


class Untraceable(Exception):
    """A forward cannot be traced or edited; the message is the reason for the report."""


@dataclass
class Reads:
    """What a module's forward depends on besides its inputs."""

    cls: type[nn.Module]  # the class whose forward it is
    inputs: tuple[str, ...]  # the names of its required inputs
    # Name of each other input -> its default.
    options: dict[str, Any] = field(default_factory=dict)
    # The inputs that may be passed by position, in order.
    positional: tuple[str, ...] = ()
    # The inputs that are sequences of tensors.
    sequences: set[str] = field(default_factory=set)
    # Attribute that it reads -> its value.
    values: dict[str, Any] = field(default_factory=dict)
    # Parameter, buffer or training flag that it reads -> whether it had a value, and not None.
    proxies: dict[str, bool] = field(default_factory=dict)
    # The forward and the methods of the class that it calls, by name.
    methods: dict[str, Any] = field(default_factory=dict)

    def required(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """The required inputs of a call, in order; None if another is not at its default.

        None also stands for a call that the forward does not take.
        """
        if len(args) > len(self.positional):
            return None
        names = self.positional[: len(args)]
        if names == self.inputs and not kwargs:
            return args
        if any(name in kwargs for name in names):
            return None
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, default in self.options.items():
            if values.pop(name, default) is not default:
                return None
        if len(values) != len(self.inputs):
            return None
        if not all(name in values for name in self.inputs):
            return None
        return tuple(values[name] for name in self.inputs)


def read(module: nn.Module, cls: type[nn.Module]) -> Reads:
    """Find what the forward of a module depends on; `Untraceable` if a trace is not safe."""
    for name in _OF_ALL_MODULES:
        if getattr(cls, name, None) is not getattr(nn.Module, name, None):
            raise Untraceable(f"its class defines {name}")
    forward = cls.forward
    if forward is nn.Sequential.forward:
        iterate = cls.__iter__  # type: ignore[attr-defined]
        if iterate is nn.Sequential.__iter__:
            methods = {"forward": forward, "__iter__": iterate}
            return Reads(cls, ("input",), positional=("input",), methods=methods)
    if not isinstance(forward, types.FunctionType):
        raise Untraceable("its forward is not a plain function")
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise Untraceable("its forward takes *args or **kwargs")
    reads = Reads(
        cls,
        inputs=tuple(p.name for p in parameters if p.default is p.empty),
        options={p.name: p.default for p in parameters if p.default is not p.empty},
        positional=tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY),
        methods={"forward": forward},
    )
    _Reader(module, cls, reads).function(forward)
    return reads


@functools.cache
def _recorded() -> frozenset[Any]:
    """The functions whose calls torch.fx records, by `__torch_function__`."""
    functions = [f for group in get_overridable_functions().values() for f in group]
    return frozenset([*functions, traceable_assert])


class _Reader:
    """Reads the source of a forward, and of the module's methods that it calls."""

    def __init__(self, module: nn.Module, cls: type[nn.Module], reads: Reads) -> None:
        self.module = module
        self.cls = cls
        self.reads = reads

    def function(self, function: types.FunctionType, forward: bool = True) -> None:
        if hasattr(function, "__wrapped__"):
            raise Untraceable(f"its {function.__name__} is decorated")
        written = _shared_definition(function)
        code = function.__code__
        if set(code.co_freevars) - {"__class__"}:
            raise Untraceable(
                f"its {function.__name__} uses variables of an enclosing function"
            )
        arguments = written.args
        names = [
            a.arg
            for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]
        if not names:
            raise Untraceable(f"its {function.__name__} is a static method")
        first = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
        optional = set(names[first:]) if forward else set()
        required = set(self.reads.inputs) if forward else set()
        scope = _Scope(
            names[0], function.__globals__, set(code.co_varnames), required, optional
        )
        for node in ast.walk(written):
            if isinstance(node, ast.For):
                scope.loop |= {
                    n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)
                }
            if isinstance(getattr(node, "ctx", None), ast.Store):
                if isinstance(node, (ast.Attribute, ast.Subscript)):
                    raise Untraceable("its forward assigns to an attribute or an item")
                if isinstance(node, ast.Name):
                    scope.optional.discard(node.id)
                    scope.required.discard(node.id)
        self.statements(written.body, scope)

    def statements(self, body: list[ast.stmt], scope: _Scope) -> None:
        for node in body:
            if not isinstance(node, _STATEMENTS):
                raise Untraceable(
                    f"its forward has a {type(node).__name__.lower()} statement"
                )
            if isinstance(node, ast.Raise):
                continue  # a trace that reaches it fails there
            if isinstance(node, ast.If) and self.is_off(node.test, scope):
                self.statements(node.orelse, scope)
                continue
            if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.Add):
                raise Untraceable("its forward changes a value in place")
            for name in ("value", "test", "iter"):
                if (expression := getattr(node, name, None)) is not None:
                    self.expression(expression, scope, name == "iter")
            for name in ("body", "orelse"):
                self.statements(getattr(node, name, []), scope)

    def is_off(self, test: ast.expr, scope: _Scope) -> bool:
        """Whether a condition is False because its first term is an attribute that is False."""
        while isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test = test.values[0]
        if not isinstance(test, ast.Attribute) or not is_name(test.value, {scope.me}):
            return False
        self.expression(test, scope, module=True)
        return self.reads.values.get(test.attr) is False

    def expression(self, node: ast.expr, scope: _Scope, module: bool = False) -> None:
        """Check an expression; module: whether it may be a module, to call or compare with None."""
        # The operand of `%` or of `.format`. The trace would freeze the text.
        text = getattr(node, "left", None) or getattr(node, "value", None)
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            raise Untraceable("its forward formats a string")
        if not isinstance(node, _EXPRESSIONS):
            raise Untraceable(
                f"its forward has a {type(node).__name__.lower()} expression"
            )
        if isinstance(node, ast.Attribute) and self.attribute(node, scope, module):
            return
        if isinstance(node, ast.Name):
            self.name(node, scope, module)
        if isinstance(node, ast.Compare):
            self.compare(node, scope)
        function = _resolve(node.func, scope) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and self.call(node, function, scope):
            return
        looped = any(function is loop for loop in _LOOPS)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword):
                self.expression(child.value, scope)
            elif isinstance(child, ast.expr):
                called = isinstance(node, ast.Call) and child is node.func
                compared = isinstance(node, ast.Compare) and child is node.left
                picked = (
                    isinstance(node, ast.Subscript) and child is node.value and module
                )
                self.expression(
                    child, scope, called or compared or picked or (looped and module)
                )

    def attribute(self, node: ast.Attribute, scope: _Scope, module: bool) -> bool:
        """Record an attribute that is read; return whether nothing inside it is left to check."""
        base: Any = node.value
        if is_name(base, {scope.me}):
            self.attribute_of_module(node.attr)
            if isinstance(self.module._modules.get(node.attr), nn.Module) and not module:
                raise Untraceable(
                    f"its forward passes self.{node.attr} to another function"
                )
            return True
        resolved = _resolve(node, scope)
        if resolved is _UNKNOWN:
            return False  # an attribute of a value that the forward has computed
        if resolved is not torch.jit.is_scripting and not _allowed(resolved):
            raise Untraceable(f"its forward uses {ast.unparse(node)}")
        return True

    def call(self, node: ast.Call, function: Any, scope: _Scope) -> bool:
        """Check a call of `isinstance` or `torch._assert`; return whether it is one."""
        if function is traceable_assert and len(node.args) == 2:
            self.expression(node.args[0], scope)  # the other argument is a message
            return True
        if function is not isinstance:
            return False
        what, cls = node.args
        name = what.id if isinstance(what, ast.Name) else ""
        if name not in scope.required or _resolve(cls, scope) is not torch.Tensor:
            raise Untraceable("its forward uses isinstance")
        self.reads.sequences.add(name)  # the trace assumes a sequence
        return True

    def attribute_of_module(self, name: str) -> None:
        """Record an attribute of the module that the forward reads, or refuse it."""
        module = self.module
        reads = self.reads
        member = inspect.getattr_static(self.cls, name, None)
        hidden = name in vars(module) and not inspect.isdatadescriptor(member)
        if name == "training":
            reads.proxies[name] = True
        elif member is not None and not hidden:
            if not isinstance(member, types.FunctionType) or hasattr(nn.Module, name):
                raise Untraceable(f"its forward reads {name}, an attribute of its class")
            if name not in reads.methods:
                reads.methods[name] = member
                self.function(member, forward=False)
        elif name in module._modules:
            return  # the trace records which children it reaches
        elif name in module._parameters or name in module._buffers:
            reads.proxies[name] = getattr(module, name) is not None
        elif name in vars(module):
            value = vars(module)[name]
            parts = value if isinstance(value, tuple) else (value,)
            if not (_allowed(value) or all(isinstance(p, _CONSTANTS) for p in parts)):
                raise Untraceable(f"its forward reads {name}, a {type(value).__name__}")
            reads.values[name] = value
        else:
            raise Untraceable(f"its forward reads {name}, which it does not have")

    def name(self, node: ast.Name, scope: _Scope, module: bool) -> None:
        if node.id == scope.me:
            raise Untraceable("its forward passes self to another function")
        if node.id in scope.loop and not module:
            raise Untraceable(f"its forward does more with {node.id} than call it")
        if node.id not in scope.local and not _allowed(_resolve(node, scope)):
            raise Untraceable(f"its forward uses {node.id}")

    def compare(self, node: ast.Compare, scope: _Scope) -> None:
        if not any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return
        of_self = isinstance(node.left, ast.Attribute) and is_name(
            node.left.value, {scope.me}
        )
        optional = isinstance(node.left, ast.Name) and node.left.id in scope.optional
        nones = [
            isinstance(c, ast.Constant) and c.value is None for c in node.comparators
        ]
        if not (of_self or optional) or nones != [True]:
            raise Untraceable("its forward compares a value with `is`")


@dataclass
class _Scope:
    """The meaning of the names in a function."""

    me: str  # the module itself
    globals: dict[str, Any]
    local: set[str]
    required: set[str]  # required inputs that are not assigned to
    optional: set[str]  # other inputs that are not assigned to
    loop: set[str] = field(default_factory=set)  # variables of loops


_UNKNOWN = object()


def _resolve(node: ast.AST, scope: _Scope) -> Any:
    """The value of a global, or of an attribute of one; `_UNKNOWN` for anything else."""
    if isinstance(node, ast.Name):
        if node.id in scope.local:
            return _UNKNOWN
        return scope.globals.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        base = _resolve(node.value, scope)
        return base if base is _UNKNOWN else getattr(base, node.attr, None)
    return _UNKNOWN


def _allowed(value: Any) -> bool:
    if not callable(value):
        return isinstance(value, torch.dtype)
    try:
        return value in _BUILTINS or value in _recorded()
    except TypeError:
        return False


# Record a forward, without changing the model.


class _Proxy(fx.Proxy):
    # torch.fx records `a += b` as `a = a + b`, but other holders of `a` see the change, too.
    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", add_in_place, (self, other), {})


@dataclass(frozen=True, eq=False)
class _Lazy(Mapping[str, Any]):
    """One of a module's dicts of children or tensors; each value is made when it is read."""

    entries: Callable[[], Mapping[str, Any]]
    make: Callable[[str, Any], Any]

    def __getitem__(self, name: str) -> Any:
        return self.make(name, self.entries()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries())

    def __len__(self) -> int:
        return len(self.entries())


class Trace(fx.Tracer):
    """A module's forward as a graph, recorded on proxies, with stand-ins for the modules.

    `fx.Tracer.trace` patches `nn.Module` while it runs, and every thread of the process sees that.
    Here nothing is patched, so other threads can run the model meanwhile. A stand-in has the class
    of its module, so that the same forward runs. In its own dicts, children are stand-ins, and
    parameters and buffers are proxies. The training flag is a proxy, too: a forward can pass it on,
    but not branch on it. The graph calls modules by the paths that the forward took to them.
    A call of a module is one node, unless the module is `inner`: its forward is inlined.

    reads: what `read` returned for the root and for each of `inner`.
    """

    def __init__(
        self,
        root: nn.Module,
        reads: Mapping[nn.Module, Reads],
        inner: Collection[nn.Module],
    ) -> None:
        super().__init__()
        self.root = root
        self.graph = fx.Graph()
        self.tensor_attrs = {}
        # For each node, the modules whose forward made it, outermost first.
        self.scopes: dict[fx.Node, tuple[nn.Module, ...]] = {}
        # The modules whose own forward is part of the graph, in order.
        self.followed: dict[nn.Module, None] = {}
        # The modules on whose children the graph depends: the root, the followed modules, and
        # the containers that were read.
        self.reached: dict[nn.Module, None] = {}
        self._reads = reads
        self._inner = frozenset(inner)
        self._scope: tuple[nn.Module, ...] = ()
        self._stand_ins: dict[str, nn.Module] = {}
        self._tensors: dict[str, fx.Proxy] = {}
        _log.debug("tracing the forward of %s", type(root).__name__)
        try:
            inputs = [
                self.create_proxy("placeholder", n, (), {}) for n in reads[root].inputs
            ]
            self.reached[root] = None
            result = reads[root].methods["forward"](self._with_forward(root, ""), *inputs)
            self.create_node("output", "output", (self.create_arg(result),), {})
        except Untraceable:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Untraceable(f"torch.fx cannot follow its forward: {text}") from error
        finally:
            self._stand_ins.clear()  # breaks the reference cycle with this tracer

    def _child(self, path: str, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if path not in self._stand_ins:
            if module in self._inner:
                made = self._with_forward(module, path)
            elif unfused_class(module) in _CONTAINERS:
                made = _made(
                    unfused_class(module), {"_modules": self._children(module, path)}
                )
            else:
                made = _made(
                    nn.Module, {"_parameters": {}, "_buffers": {}, "_modules": {}}
                )
            # If this is set, `nn.Module.__call__` calls it and runs no hook.
            vars(made)["_compiled_call_impl"] = functools.partial(
                self._call, module, path
            )
            self._stand_ins[path] = made
        return self._stand_ins[path]

    def _with_forward(self, module: nn.Module, path: str) -> nn.Module:
        """A stand-in that can be `self` in the module's forward."""
        reads = self._reads[module]
        state: dict[str, Any] = {
            **vars(module),
            "_modules": self._children(module, path),
            "_parameters": self._table(module._parameters, path),
            "_buffers": self._table(module._buffers, path),
        }
        if "training" in reads.proxies:
            state["training"] = self.create_proxy(
                "get_attr", _joined(path, "training"), (), {}
            )
        return _made(reads.cls, state)

    def _children(self, module: nn.Module, path: str) -> _Lazy:
        def entries() -> dict[str, nn.Module | None]:
            self.reached[module] = None
            return module._modules

        return _Lazy(entries, lambda name, child: self._child(_joined(path, name), child))

    def _table(self, tensors: Mapping[str, Any], path: str) -> _Lazy:
        def make(name: str, tensor: Any) -> fx.Proxy | None:
            target = _joined(path, name)
            if tensor is not None and target not in self._tensors:
                self._tensors[target] = self.create_proxy("get_attr", target, (), {})
            return self._tensors.get(target)

        return _Lazy(lambda: tensors, make)

    def _call(self, module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
        # Arguments may be constants: the forward was traced by itself, so whatever it does with
        # its inputs is in the graph.
        if (
            module not in self._inner
            or kwargs
            or len(args) != len(self._reads[module].inputs)
        ):
            if any(map(_may_change, (*args, *kwargs.values()))):
                raise Untraceable(
                    "its forward passes a list or dict, which a module may change"
                )
            return self.create_proxy("call_module", path, args, kwargs)
        self.followed[module] = self.reached[module] = None
        outer = self._scope
        self._scope = (*outer, module)
        try:
            return self._reads[module].methods["forward"](self._stand_ins[path], *args)
        finally:
            self._scope = outer

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise Untraceable("its forward has a branch on its input or on `self.training`")

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):  # parameters and buffers come as proxies
            raise Untraceable("its forward makes a tensor")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.scopes[node] = self._scope
        return node


def _may_change(value: Any) -> bool:
    """Whether a call may change a value in place and unseen: a graph makes a new one each time."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, (list, dict, set))


def _made(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    """Make an instance without calling its constructor."""
    instance = object.__new__(cls)
    vars(instance).update(state)
    return instance


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# Definitions of functions, parsed from their source files.


def definition(function: types.FunctionType) -> ast.FunctionDef:
    """Parse the definition of a function, without its decorators, if it compiles to its code."""
    name = function.__name__
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(function)
        indented = lines[0][:1].isspace()
        tree = ast.parse("if 1:\n" * indented + "".join(lines))
        compiles = code in _codes("".join(linecache.getlines(code.co_filename)))
    except (OSError, TypeError, SyntaxError):
        raise Untraceable(f"the source of its {name} cannot be read") from None
    parsed = tree.body[0].body[0] if indented else tree.body[0]  # type: ignore[attr-defined]
    if not isinstance(parsed, ast.FunctionDef):
        raise Untraceable(f"its {name} is not a plain function")
    if not compiles:
        raise Untraceable(f"its {name} does not match its source")
    ast.increment_lineno(parsed, first - 1 - indented)
    parsed.decorator_list = []
    return parsed


# Not for `edit`, which changes the definition.
_shared_definition = functools.cache(definition)


@functools.cache
def _codes(source: str) -> frozenset[types.CodeType]:
    """The code of all functions in a file; a notebook compiles a cell statement by statement."""
    tree = ast.parse(source)
    parts = [tree, *(ast.Module([statement], []) for statement in tree.body)]
    waiting: list[Any] = [
        compile(part, "<source>", "exec", dont_inherit=True) for part in parts
    ]
    codes = set[types.CodeType]()
    while waiting:
        code = waiting.pop()
        if isinstance(code, types.CodeType):
            codes.add(code)
            waiting += code.co_consts
    return frozenset(codes)


def compiled(
    function: types.FunctionType, written: ast.FunctionDef, enclosing: Iterable[str] = ()
) -> types.CodeType:
    """Compile a definition to replace a function's code; it may use more `enclosing` variables."""
    code = function.__code__
    around = ast.parse(f"def around({', '.join((*code.co_freevars, *enclosing))}): pass")
    around.body[0].body = [written]  # type: ignore[attr-defined]
    made = compile(around, code.co_filename, "exec", dont_inherit=True)
    for name in ("around", written.name):
        parts = (c for c in made.co_consts if isinstance(c, types.CodeType))
        made = next(c for c in parts if c.co_name == name)
    return made.replace(co_firstlineno=code.co_firstlineno)


def is_name(node: Any, names: Collection[str]) -> bool:
    """Whether an expression is a variable with one of these names."""
    return isinstance(node, ast.Name) and node.id in names
