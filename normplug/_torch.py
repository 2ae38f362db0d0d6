"""Every private name of torch that normplug uses; no other file of the package uses one.

A name is private if its path from `torch` has a part that begins with one underscore, whether it
is imported, written with dots or passed to `getattr`. Attributes of an object in hand, such as
`module._parameters` or `tensor._version`, do not count and may be used anywhere.

All names exist in torch 2.6 to 2.15, except where a comment says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.utils._pytree import tree_leaves

__all__ = ["BatchNormBase", "InstanceNormBase", "NormBase", "tree_leaves"]

# Whether autocast makes `F.rms_norm` return float32 on CUDA, like `F.layer_norm`; not in 2.11.
RMS_NORM_AUTOCASTS: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::rms_norm", "AutocastCUDA"
)

# --- The current GPU. Every launch calls these; the public functions are slower ---

# CPU builds of torch have neither.
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device_index: Any = getattr(torch._C, "_cuda_getDevice", None)

# --- Transforms, modes and tracers, which see torch's operations and would miss a kernel ---

# Whether a transform of `torch.func` is active.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# How many `TorchDispatchMode`s are active.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def is_tracing() -> bool:
    """Whether `torch.jit.trace` is recording. The public function checks more."""
    return torch._C._get_tracing_state() is not None


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def interposed() -> bool:
    """Whether a transform, a mode or a tracer sees torch's operations, and would miss a kernel."""
    # Inline: every norm call runs this, so it does not call `in_forward_ad` and `is_tracing`.
    return (
        transforms_active()
        or forward_ad._current_level >= 0
        or dispatch_modes() > 0
        or torch._C._get_tracing_state() is not None
    )


_aten = torch.ops.aten
# Operators that a compiler does not keep apart from what made their input.
_VIEWS_AND_CASTS = frozenset((
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.permute.default,
    _aten.transpose.int, _aten.t.default, _aten.squeeze.dim, _aten.unsqueeze.default,
    _aten._to_copy.default,
))  # fmt: skip
_MATMULS = frozenset((
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten.convolution.default,
))  # fmt: skip


def is_matmul_output(t: Tensor) -> bool:
    """Whether the graph of a compiler has t as the result of a matmul or a convolution.

    The compiler does not fuse these with the next operator, as it does others. False if nothing is
    recorded.
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return False
    if isinstance(t, FunctionalTensor):
        t = torch._from_functional_tensor(t.elem)
    recorded = proxy_tensor.get_proxy_slot(t, mode.tracer, None)
    node: Any = None if recorded is None else recorded.proxy.node
    while node is not None and node.target in _VIEWS_AND_CASTS:
        node = node.args[0]
    return node is not None and node.target in _MATMULS


# Dynamo evaluates `torch.compiler.is_exporting()` to True whenever it compiles; not in torch 2.6.
_HAS_EXPORT_FLAG = hasattr(torch.compiler, "_is_exporting_flag")


def is_exporting() -> bool:
    """Whether `torch.export` is tracing."""
    return _HAS_EXPORT_FLAG and torch.compiler._is_exporting_flag


# Whether autocast is on, for any device.
in_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled

# --- Autograd ---

# Returns the plain tensor in a wrapper that a finished transform of `torch.func` left behind.
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
_autograd: Any = torch._C._autograd
saved_tensors_hooks_are_allowed: Callable[[], bool] = (
    _autograd._saved_tensors_hooks_is_enabled
)
# The active hooks on saved tensors; since torch 2.8. Without it nothing is recomputed, because that
# would silently override the hooks of activation checkpointing.
top_saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    _autograd, "_top_saved_tensors_default_hooks", None
)


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's `apply` without its search for tensors that `torch.func` has wrapped.

    The search costs as much host time as a launch. Only for calls where no transform is active.
    """
    base: Any = super(torch.autograd.Function, function)
    return base.apply


def in_backward() -> bool:
    """Whether a backward is running: inside one, activation checkpointing repeats forwards."""
    return torch._C._current_graph_task_id() != -1


# --- Distributed ---


def symmetric_memory() -> Any:
    """The module of memory that the GPUs of a host share, which imports Triton; None without it."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory if hasattr(_symmetric_memory, "rendezvous") else None


def group_of_name(name: Any) -> Any:
    """The process group of a name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


# --- Modules and functions ---

# torch.fx records calls of it, although it is not among the overridable functions.
traceable_assert = torch._assert


# The hooks that run when any module is called.
GLOBAL_HOOKS = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
)


def is_parametrized_class(cls: type) -> bool:
    """Whether `torch.nn.utils.parametrize` derived a class for a single module."""
    return cls.__name__.startswith("Parametrized") and "__getstate__" in vars(cls)


def is_patched(module: nn.Module) -> bool:
    """Whether an attribute of the instance replaces the class's `forward`.

    The class's own method, bound to the instance, does not count: accelerate leaves one behind when
    it removes its hooks.
    """
    if "forward" not in module.__dict__:
        return False
    return (
        getattr(module.__dict__["forward"], "__func__", None) is not type(module).forward
    )


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
        or ("forward" in module.__dict__ and is_patched(module))
    )


def remove_hooks(module: nn.Module, kind: type) -> None:
    """Remove the forward hooks of a module that are instances of `kind`."""
    hooks: Any
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


# --- Measuring, for normplug.bench ---

# Keeps the GPU busy for a number of cycles, while the host runs ahead of it.
gpu_sleep: Any = torch.cuda._sleep
