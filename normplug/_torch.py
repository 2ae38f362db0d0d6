"""Every private name of torch that normplug uses; no other file of the package uses one.

A name is private if its path from `torch` has a part that begins with one underscore, whether it
is imported, written with dots or passed to `getattr`. Attributes of an object in hand, such as
`module._parameters` or `tensor._version`, do not count and may be used anywhere.

`_private` looks each name up once, when this file is imported. If torch lacks the name, a fallback
on public names takes its place; it costs more host time or gives up a fast route. The functions
here that begin with an underscore are these fallbacks. All names exist in torch 2.6 to 2.15, except
where a comment says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")

# torch 2.9 and 2.10 do not compile a module that writes to a buffer which is a DTensor.
COMPILES_WRITES_TO_DTENSORS = not torch.__version__.startswith(("2.9.", "2.10."))


def _private(path: str, fallback: T) -> T:
    """Return the attribute of torch at the dotted `path`, or `fallback` if there is none."""
    found: Any = torch
    try:
        for name in path.split("."):
            found = getattr(found, name)
        return found
    except AttributeError:
        return fallback


# --- The bases of the norm classes, found through public classes ---


def _shared_base(*classes: type) -> type:
    """The most derived class that all of `classes` inherit from."""
    return next(b for b in classes[0].__mro__ if all(issubclass(cls, b) for cls in classes))


if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _LazyNormBase as LazyNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
else:
    BatchNormBase = _shared_base(nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
    LazyNormBase = _shared_base(nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d)
    NormBase = _shared_base(nn.BatchNorm1d, nn.InstanceNorm1d)
    InstanceNormBase = _shared_base(nn.InstanceNorm1d, nn.InstanceNorm2d)


# --- The current GPU. The public functions are slower, and every launch calls these ---


def _current_raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# CPU builds of torch have neither.
current_raw_stream = _private("_C._cuda_getCurrentRawStream", _current_raw_stream)
current_device_index = _private("_C._cuda_getDevice", torch.cuda.current_device)


# --- Transforms, modes and tracers, which see torch's operations and would miss a kernel ---


class _NeedsNoTransform(torch.autograd.Function):
    """Has no `setup_context`, so it cannot be applied under a transform of `torch.func`."""

    @staticmethod
    def forward(ctx: Any) -> None:
        """Do nothing."""


def _transforms_active() -> bool:
    if torch.compiler.is_compiling():  # Dynamo cannot trace the test below: assume none
        return False
    try:
        _NeedsNoTransform.apply()
    except RuntimeError:
        return True
    return False


class _ForwardAD:
    """Stands in for `torch.autograd.forward_ad`, which refuses to enter a second level."""

    @property
    def _current_level(self) -> int:
        if torch.compiler.is_compiling():  # as above
            return -1
        try:
            with forward_ad.dual_level():
                return -1
        except RuntimeError:
            return 0


def _dispatch_modes() -> int:
    """Assume one: calls then use `torch.library` operators, which work under every mode."""
    return 1


def _is_tracing_or_none() -> bool | None:
    return torch.jit.is_tracing() or None


# Whether a transform of `torch.func` is active.
transforms_active = _private("_C._are_functorch_transforms_active", _transforms_active)
_all_dispatch_modes = _private("_C._len_torch_dispatch_stack", _dispatch_modes)
# The mode of fake tensors to which plans are shown, and what records their launches.
_shown: tuple[Any, Any] | None = None
# The state of `torch.jit.trace`; None if it is not recording. The public function checks more.
_tracing_state = _private("_C._get_tracing_state", _is_tracing_or_none)
_forward_ad: Any = (
    _ForwardAD() if _private("autograd.forward_ad._current_level", None) is None else forward_ad
)


def dispatch_modes() -> int:
    """How many `TorchDispatchMode`s are active, without the one of `shown_mode`."""
    count = _all_dispatch_modes()
    if count and _shown is not None and _current_dispatch_mode() is _shown[0]:
        count -= 1
    return count


def fake_mode() -> Any:
    """A mode of fake tensors, which have shapes and no values. Importing it takes a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _current_dispatch_mode() -> Any:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()


@contextmanager
def shown_mode(mode: Any, recorder: Any) -> Iterator[None]:
    """Within a `with` block, plans take the fake tensors of a mode, and `recorder` their launches."""
    global _shown
    _shown = (mode, recorder)
    try:
        yield
    finally:
        _shown = None


def is_mode_shown() -> bool:
    """Whether a `shown_mode` is open, in any thread."""
    return _shown is not None


def recorder_of(t: Tensor) -> Any:
    """What records launches on this fake tensor; None for any other tensor."""
    if _shown is None or getattr(t, "fake_mode", None) is not _shown[0]:
        return None
    return _shown[1]


def interposed() -> bool:
    """Whether a transform, a mode or a tracer sees torch's operations, and would miss a kernel."""
    return (
        transforms_active()
        or _forward_ad._current_level >= 0
        or dispatch_modes() > 0
        or _tracing_state() is not None
    )


def is_tracing() -> bool:
    """Whether `torch.jit.trace` is recording."""
    return _tracing_state() is not None


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation is active."""
    return _forward_ad._current_level >= 0


# Dynamo evaluates `torch.compiler.is_exporting()` to True whenever it compiles. So without the
# flag, compiled models use torch's own operations. torch 2.6 has neither.
_HAS_EXPORT_FLAG = _private("compiler._is_exporting_flag", None) is not None
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def is_exporting() -> bool:
    """Whether `torch.export` is tracing."""
    return torch.compiler._is_exporting_flag if _HAS_EXPORT_FLAG else _is_exporting()


# --- Autograd ---


def _plain(t: Tensor) -> Tensor:
    return t.view_as(t)  # outside a transform, the result of an operation is not a wrapper


# Returns the plain tensor in a wrapper that a finished transform of `torch.func` left behind.
unwrap_if_dead = _private("_C._functorch.unwrap_if_dead", _plain)


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's `apply` without its search for tensors that `torch.func` has wrapped.

    The search costs as much host time as a launch. Only for calls where no transform is active.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def _saved_tensors_hooks_are_allowed() -> bool:
    def same(t: Any) -> Any:
        return t

    try:
        with saved_tensors_hooks(same, same):
            return True
    except RuntimeError:
        return False


saved_tensors_hooks_are_allowed = _private(
    "_C._autograd._saved_tensors_hooks_is_enabled", _saved_tensors_hooks_are_allowed
)
# The active hooks on saved tensors; since torch 2.8. Without it nothing is recomputed, because that
# would silently override the hooks of activation checkpointing.
top_saved_tensors_hooks: Callable[[bool], Any] | None = _private(
    "_C._autograd._top_saved_tensors_default_hooks", None
)


# --- Distributed ---


def symmetric_memory() -> Any:
    """The module of memory that the GPUs of a host share, which imports Triton; None without it."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory if hasattr(_symmetric_memory, "rendezvous") else None


def _world(name: str) -> Any:
    """The group of all processes, whatever the name."""
    return torch.distributed.group.WORLD


# The process group of a name. Without distributed, nothing calls it.
group_of_name = _private("_C._distributed_c10d._resolve_process_group", _world)

# --- Modules, functions and results ---

# Global module hooks. If they cannot be read, assume one: modules are then called one by one.
_ASSUMED = {0: None}
_forward_hooks = _private("nn.modules.module._global_forward_hooks", _ASSUMED)
_forward_pre_hooks = _private("nn.modules.module._global_forward_pre_hooks", _ASSUMED)
_backward_hooks = _private("nn.modules.module._global_backward_hooks", _ASSUMED)
_backward_pre_hooks = _private("nn.modules.module._global_backward_pre_hooks", _ASSUMED)


def has_global_hooks() -> bool:
    """Whether a hook runs when any module is called."""
    return bool(_forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks)


def is_patched(module: nn.Module) -> bool:
    """Whether an attribute of the instance replaces the class's `forward`.

    The class's own method, bound to the instance, does not count: accelerate leaves one behind when
    it removes its hooks.
    """
    if "forward" not in module.__dict__:
        return False
    return getattr(module.__dict__["forward"], "__func__", None) is not type(module).forward


def is_class_patched(cls: type[nn.Module]) -> bool:
    """Whether other code has replaced a class's `forward`: its function is of another module."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward, home = vars(owner)["forward"], sys.modules.get(owner.__module__)
    return home is not None and getattr(forward, "__globals__", None) is not vars(home)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more, or something other, than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or is_patched(module)
    )


def _assert(condition: Any, message: str) -> None:
    assert condition, message


# torch.fx records calls of it, although it is not among the overridable functions.
traceable_assert = _private("_assert", _assert)


def _tree_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if not isinstance(tree, (list, tuple)):
        return [tree]
    return [leaf for child in tree for leaf in _tree_leaves(child)]


# The leaves of a model's output. The fallback finds those in mappings, lists and tuples only.
tree_leaves: Callable[[Any], list[Any]] = _private("utils._pytree.tree_leaves", _tree_leaves)


def _tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _tree_map_only(kind, function, child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_tree_map_only(kind, function, child) for child in tree]
    return function(tree) if isinstance(tree, kind) else tree


# A batch with its tensors replaced. The fallback looks into mappings, lists and tuples only.
tree_map_only: Callable[..., Any] = _private("utils._pytree.tree_map_only", _tree_map_only)


# --- Autocast ---


def _knows_kernels(operator: str, key: str) -> bool:
    return True  # as in new versions


# Whether autocast has `F.rms_norm` return float32 on CUDA, as it does `F.layer_norm`: not in 2.11.
RMS_NORM_AUTOCASTS: bool = _private("_C._dispatch_has_kernel_for_dispatch_key", _knows_kernels)(
    "aten::rms_norm", "AutocastCUDA"
)


# --- Measuring, for normplug.bench ---


def _gpu_sleep(cycles: int) -> None:
    """Fill 64 MiB repeatedly. `cycles` are then not clock cycles; bench calibrates the unit."""
    filler = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(cycles // 50_000 + 1):
        filler.zero_()


def _unknown_backend(*arguments: Any) -> Any:
    return SimpleNamespace(name="unknown")


# Keeps the GPU busy while the host runs ahead of it.
gpu_sleep = _private("cuda._sleep", _gpu_sleep)
# Which backend torch's own BatchNorm selects; reported with its timings.
select_batch_norm_backend: Callable[..., Any] = _private(
    "_C._select_batch_norm_backend", _unknown_backend
)
