"""A module's forward as a graph of torch.fx, where taking it down once and for all is safe.

torch.fx runs a forward on proxies and records the operations. Whatever Python decides on the way is
burnt in: the value of an attribute, a global, a random number, an `isinstance`. So the source is
read first. Only a forward that is known to depend on nothing but its inputs, the module's own
attributes and which children the modules have is traced. All of these are noted, to be compared at
each call.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import get_overridable_functions

from normplug._fuse.fused_class import plain_class
from normplug._torch import traceable_assert

_STATEMENTS = (
    ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.If, ast.For, ast.Pass,
    ast.Assert, ast.Raise,
)  # fmt: skip
_EXPRESSIONS = (
    ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp,
    ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred, ast.JoinedStr,
)  # fmt: skip
_LOOPS = (enumerate, zip, reversed)
# `bool`, `int`, `float` and `len` of a proxy raise an error.
_BUILTINS = (range, tuple, list, bool, int, float, len, *_LOOPS)
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.Size)
# Where a class has its own, what a forward does cannot be told from its source.
_OF_ALL_MODULES = ("__call__", "__getattr__", "__getattribute__", "__del__")
# What a forward may go through. A subclass may do that in a way of its own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Untraceable(Exception):
    """Why a forward is not traced, for the report."""


@dataclass
class Reads:
    """What a module's forward depends on beside its inputs.

    Attributes:
        cls: the class whose forward it is.
        inputs: the names of those that it must be given.
        sequences: which of them it takes for sequences of tensors.
        values: attributes, and what they were.
        tensors: parameters and buffers, and whether there was one.
        methods: the forward, and those of the class that it calls.
        training: whether it asks for the training flag.
    """

    cls: type[nn.Module]
    inputs: tuple[str, ...]
    sequences: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, bool] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    training: bool = False


def read(module: nn.Module, cls: type[nn.Module]) -> Reads:
    """What a module's forward depends on.

    Args:
        module: the module.
        cls: whose forward it is.

    Raises:
        Untraceable: where the forward does something that cannot be traced safely.
    """
    for name in _OF_ALL_MODULES:
        if getattr(cls, name, None) is not getattr(nn.Module, name, None):
            raise Untraceable(f"its class defines {name}")
    forward = cls.forward
    if forward is nn.Sequential.forward and cls.__iter__ is nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Reads(cls, ("input",), methods={"forward": forward, "__iter__": cls.__iter__})  # type: ignore[attr-defined]
    if not isinstance(forward, types.FunctionType):
        raise Untraceable("its forward is no plain function")
    required = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Untraceable("its forward takes *args or **kwargs")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    reads = Reads(cls, tuple(required), methods={"forward": forward})
    _Reader(module, cls, reads).function(forward)
    return reads


@functools.cache
def _source(function: types.FunctionType) -> ast.FunctionDef:
    if hasattr(function, "__wrapped__"):
        raise Untraceable(f"its {function.__name__} is decorated")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        raise Untraceable(f"the source of its {function.__name__} cannot be read") from None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__name__:
        raise Untraceable(f"its {function.__name__} is no plain function")
    if definition.decorator_list:
        raise Untraceable(f"its {function.__name__} is decorated")
    return definition


@functools.cache
def _recorded() -> frozenset[Any]:
    """The functions that torch.fx records: those that can be overridden."""
    functions = [f for group in get_overridable_functions().values() for f in group]
    return frozenset([*functions, traceable_assert])


class _Reader:
    """Goes through a forward, and through the module's methods that it calls."""

    def __init__(self, module: nn.Module, cls: type[nn.Module], reads: Reads) -> None:
        self.module, self.cls, self.reads = module, cls, reads
        self.seen: set[types.FunctionType] = set()

    def function(self, function: types.FunctionType, optional: bool = True) -> None:
        if function in self.seen:
            return
        self.seen.add(function)
        definition = _source(function)
        code = function.__code__
        if set(code.co_freevars) - {"__class__"}:
            raise Untraceable(f"its {function.__name__} uses variables of what it was defined in")
        arguments = definition.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if not names:
            raise Untraceable(f"its {function.__name__} is a static method")
        first = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
        given = set(names[first:]) if optional else set()
        required = set(self.reads.inputs) if optional else set()
        scope = _Scope(
            names[0], function.__globals__, set(code.co_varnames), set(), given, required
        )
        for node in ast.walk(definition):
            if isinstance(node, ast.For):
                scope.loop |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                scope.optional.discard(node.id)
                scope.given.discard(node.id)
        self.statements(definition.body, scope)

    def statements(self, body: list[ast.stmt], scope: _Scope) -> None:
        for node in body:
            if not isinstance(node, _STATEMENTS):
                raise Untraceable(f"its forward has a {_kind(node)} statement")
            if isinstance(node, ast.Raise):
                continue  # ends the trace where it is reached
            if isinstance(node, ast.If) and self.is_off(node.test, scope):
                self.statements(node.orelse, scope)
                continue
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
                self.targets(node)
            if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.Add):
                raise Untraceable("its forward changes a value in place")
            for name in ("value", "test", "iter"):
                if (expression := getattr(node, name, None)) is not None:
                    self.expression(expression, scope, name == "iter")
            for name in ("body", "orelse"):
                self.statements(getattr(node, name, []), scope)

    def is_off(self, test: ast.expr, scope: _Scope) -> bool:
        """Whether a condition starts with an attribute that is False now."""
        while isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test = test.values[0]
        if not isinstance(test, ast.Attribute) or not _is_name(test.value, scope.me):
            return False
        self.expression(test, scope, module=True)
        return self.reads.values.get(test.attr) is False

    def targets(self, node: Any) -> None:
        for target in getattr(node, "targets", None) or [node.target]:
            for part in ast.walk(target):
                if isinstance(part, (ast.Attribute, ast.Subscript)):
                    raise Untraceable("its forward assigns to an attribute or an item")

    def expression(self, node: ast.expr, scope: _Scope, module: bool = False) -> None:
        """module: whether it may be a module, which then is called, or compared with None."""
        if not isinstance(node, _EXPRESSIONS):
            raise Untraceable(f"its forward has a {_kind(node)} expression")
        if isinstance(node, ast.JoinedStr):
            return  # a message
        if isinstance(node, ast.Attribute) and self.attribute(node, scope, module):
            return
        if isinstance(node, ast.Name):
            self.name(node, scope, module)
        if isinstance(node, ast.Compare):
            self.compare(node, scope)
        function = _resolve(node.func, scope) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and function is isinstance:
            self.is_tensor(node, scope)
            return
        looped = any(function is loop for loop in _LOOPS)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword):
                self.expression(child.value, scope)
            elif isinstance(child, ast.expr):
                called = isinstance(node, ast.Call) and child is node.func
                compared = isinstance(node, ast.Compare) and child is node.left
                picked = isinstance(node, ast.Subscript) and child is node.value and module
                self.expression(child, scope, called or compared or picked or (looped and module))

    def attribute(self, node: ast.Attribute, scope: _Scope, module: bool) -> bool:
        """Note what is read off the module; whether there is no more to look at."""
        base: Any = node.value
        if _is_name(base, scope.me):
            self.own(node.attr)
            if isinstance(self.module._modules.get(node.attr), nn.Module) and not module:
                raise Untraceable(f"its forward passes self.{node.attr} to another function")
            return True
        resolved = _resolve(node, scope)
        if resolved is _UNKNOWN:
            return False  # of a value that the forward has computed
        if resolved is not torch.jit.is_scripting and not _allowed(resolved):
            raise Untraceable(f"its forward uses {ast.unparse(node)}")
        return True

    def is_tensor(self, node: ast.Call, scope: _Scope) -> None:
        """Of an input: what is traced is the course that others than tensors take."""
        what, cls = node.args
        name = what.id if isinstance(what, ast.Name) else ""
        if name not in scope.given or _resolve(cls, scope) is not torch.Tensor:
            raise Untraceable("its forward uses isinstance")
        self.reads.sequences.add(name)

    def own(self, name: str) -> None:
        module, reads = self.module, self.reads
        found = inspect.getattr_static(self.cls, name, None)
        hidden = name in vars(module) and not inspect.isdatadescriptor(found)
        if name == "training":
            reads.training = True
        elif found is not None and not hidden:
            if not isinstance(found, types.FunctionType) or hasattr(nn.Module, name):
                raise Untraceable(f"its forward reads {name}, which is of its class")
            reads.methods[name] = found
            self.function(found, optional=False)
        elif name in module._modules:
            return  # the trace tells which children it reaches
        elif name in module._parameters or name in module._buffers:
            reads.tensors[name] = getattr(module, name) is not None
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
        of_self = isinstance(node.left, ast.Attribute) and _is_name(node.left.value, scope.me)
        optional = isinstance(node.left, ast.Name) and node.left.id in scope.optional
        against = node.comparators
        if not (of_self or optional) or not _is_none(against[0]) or len(against) > 1:
            raise Untraceable("its forward asks for the identity of a value")


@dataclass
class _Scope:
    me: str
    globals: dict[str, Any]
    local: set[str]
    loop: set[str]
    optional: set[str]
    given: set[str]


_UNKNOWN = object()


def _resolve(node: ast.AST, scope: _Scope) -> Any:
    """What a dotted name of a global means; `_UNKNOWN` where it starts from anything else."""
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


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _kind(node: ast.AST) -> str:
    return type(node).__name__.lower()


def add_in_place(a: Any, b: Any) -> Any:
    """`a += b`, as a function that a graph can call."""
    a += b
    return a


class _Proxy(fx.Proxy):
    # torch.fx takes `a += b` for `a = a + b`, which nobody else who holds a would see.
    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", add_in_place, (self, other), {})


class _Lazy(Mapping[str, Any]):
    """A table of a module whose entries are made when they are read."""

    def __init__(
        self, entries: Callable[[], Mapping[str, Any]], make: Callable[[str, Any], Any]
    ) -> None:
        self._entries, self._make = entries, make

    def __getitem__(self, name: str) -> Any:
        return self._make(name, self._entries()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())


class _Tracer(fx.Tracer):
    """Runs a forward on proxies, with stand-ins for the modules.

    `fx.Tracer.trace` patches `nn.Module` while it runs, which every thread of the process sees.
    Here nothing is patched. A stand-in has the class of its module, so that the same forward runs,
    and tables of its own: children are stand-ins, parameters and buffers are proxies.
    """

    def __init__(
        self, root: nn.Module, reads: Mapping[nn.Module, Reads], inner: Collection[nn.Module]
    ) -> None:
        super().__init__()
        self.root, self.graph = root, fx.Graph()
        self.tensor_attrs = {}
        self.scopes: dict[fx.Node, tuple[nn.Module, ...]] = {}
        self.followed: dict[nn.Module, None] = {}  # in order
        self.reached: dict[nn.Module, None] = {}
        self._reads, self._inner = reads, frozenset(inner)
        self._scope: tuple[nn.Module, ...] = ()
        self._stand_ins: dict[str, nn.Module] = {}
        self._tensors: dict[str, fx.Proxy] = {}

    def record(self, training: bool) -> None:
        """Fill the graph with the root's forward, for one value of the training flag."""
        reads, self._training = self._reads[self.root], training
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in reads.inputs]
        self.reached[self.root] = None
        root = self._with_forward(self.root, "")
        try:
            result = reads.methods["forward"](root, *inputs)
            self.create_node("output", "output", (self.create_arg(result),), {})
        finally:
            self._stand_ins.clear()  # they refer to this tracer, and it to them

    def _child(self, path: str, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if path not in self._stand_ins:
            if module in self._inner:
                made = self._with_forward(module, path)
            elif plain_class(module) in _CONTAINERS:
                made = _made(plain_class(module), {"_modules": self._children(module, path)})
            else:
                made = _made(nn.Module, {"_parameters": {}, "_buffers": {}, "_modules": {}})
            # What `nn.Module.__call__` calls, before any hook, where there is one.
            vars(made)["_compiled_call_impl"] = functools.partial(self._call, module, path)
            self._stand_ins[path] = made
        return self._stand_ins[path]

    def _with_forward(self, module: nn.Module, path: str) -> nn.Module:
        """What can be `self` in the module's forward."""
        tables = {
            "training": self._training,
            "_modules": self._children(module, path),
            "_parameters": self._table(module._parameters, path),
            "_buffers": self._table(module._buffers, path),
        }
        return _made(self._reads[module].cls, {**vars(module), **tables})

    def _children(self, module: nn.Module, path: str) -> _Lazy:
        def read() -> dict[str, nn.Module | None]:
            self.reached[module] = None
            return module._modules

        return _Lazy(read, lambda name, child: self._child(_joined(path, name), child))

    def _table(self, tensors: Mapping[str, Any], path: str) -> _Lazy:
        def read(name: str, tensor: Any) -> fx.Proxy | None:
            target = _joined(path, name)
            if tensor is not None and target not in self._tensors:
                self._tensors[target] = self.create_proxy("get_attr", target, (), {})
            return self._tensors.get(target)

        return _Lazy(lambda: tensors, read)

    def _call(self, module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
        plain = not kwargs and all(isinstance(a, fx.Proxy) for a in args)
        if module not in self._inner or not plain or len(args) != len(self._reads[module].inputs):
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

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):  # parameters and buffers come as proxies
            raise Untraceable("its forward makes a tensor of its own")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.scopes[node] = self._scope
        return node


def _made(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    """An instance that no constructor has seen."""
    instance = object.__new__(cls)
    vars(instance).update(state)
    return instance


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Trace:
    """A module's forward as a graph.

    Attributes:
        graph: its calls of modules have the paths by which the forward came to them.
        scopes: of each node the modules whose forward it stems from, outside in.
        followed: the modules whose own forward is part of the graph.
        reached: the root, those, and the containers that were gone through; of all these the
            graph depends on which children they have.
    """

    graph: fx.Graph
    scopes: dict[fx.Node, tuple[nn.Module, ...]]
    followed: tuple[nn.Module, ...]
    reached: tuple[nn.Module, ...]


def trace(
    root: nn.Module,
    reads: Mapping[nn.Module, Reads],
    inner: Collection[nn.Module],
    training: bool,
) -> Trace:
    """The graph of a module's forward, for one value of the training flag.

    The model stays as it is, and other threads can run it.

    Args:
        root: the module.
        reads: of it, and of each of `inner`.
        inner: the modules whose own forward is followed; every other is one node.
        training: the flag of all of these.

    Raises:
        Untraceable: where torch.fx cannot follow.
    """
    tracer = _Tracer(root, reads, inner)
    try:
        tracer.record(training)
    except Untraceable:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Untraceable(f"torch.fx cannot follow its forward: {text}") from error
    return Trace(tracer.graph, tracer.scopes, tuple(tracer.followed), tuple(tracer.reached))
