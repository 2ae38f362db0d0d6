"""The functions that a fused forward calls, each in place of several calls.

Each function decides at run time. It calls the modules one by one, as written, if no kernel can run
the norm, if a module has hooks, if a `VarianceLogger` needs the norm's own forward, or if a
residual does not match the tensor that it is added to.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from normplug import _activations
from normplug._activations import ActivationLike
from normplug._ops import can_run, convolutions, recompute
from normplug._ops.spec import Pool
from normplug._torch import has_hooks
from normplug.modules.base import FusionSites

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def add_in_place(a: Any, b: Any) -> Any:
    """`a += b`, as a function that a graph can call."""
    a += b
    return a


def norm_add_activation(
    norm: Any,
    x: Tensor,
    activation: Any,
    between: tuple[nn.Module, ...] = (),
    residual: Tensor | None = None,
    in_place: bool = False,
    flipped: bool = False,
    other: Any = None,
    *,
    keeps_residual: bool = False,
) -> Tensor:
    """Apply a norm, add a residual, and apply an activation.

    norm: in an edited forward, any module. activation: a module, or the `activation` of
    `functional.batch_norm`; in an edited forward, also any function. between: the `nn.Identity`
    modules after the norm. in_place, flipped: whether the addition is in place, and whether the
    residual is its left operand. other: the norm that is applied to the residual first, or None.
    keeps_residual: whether other modules save the residual anyway, unless they recompute it.
    """
    name = _name(activation)
    only_adds = activation is None and residual is not None
    may_run = (name is not None or only_adds) and _may_run(
        norm, x, "activation", activation, *between
    )
    if other is not None:
        assert residual is not None
        if may_run and _may_join(norm, x, other, residual):
            return norm._fused_norms(x, residual, other, name)
        residual = isolated_norm(other, residual)
    if may_run and (residual is None or _alike(x, residual)):
        if residual is None:
            return norm._fused(x, activation=name)
        compiling = torch.compiler.is_compiling()
        if keeps_residual and not (compiling or recompute.will_recompute(residual)):
            return norm._fused(x, residual, name, keeps_residual=True)
        return norm._fused(x, residual, name)
    y = norm(x)
    for module in between:
        y = module(y)
    if residual is not None:
        add = add_in_place if in_place else operator.add
        y = add(residual, y) if flipped else add(y, residual)
    if only_adds or isinstance(activation, (str, tuple)):
        return _activations.apply(activation, y)
    result: Tensor = activation(y)
    return result


def isolated_norm(norm: Any, x: Tensor) -> Tensor:
    """Apply a norm whose only reader is a fused call: a compiler has nothing to fuse it with."""
    if _may_run(norm, x, "addition"):
        return norm._fused(x, isolated=torch.compiler.is_compiling())
    return norm(x)


def norm_max_pool(
    norm: Any,
    x: Tensor,
    activation: Any,
    between: tuple[nn.Module, ...],
    pool: nn.Module,
) -> Tensor:
    """Apply a norm, an activation (relu, unless its module has changed) and max pooling.

    between: the `nn.Identity` modules after the norm.
    """
    window, is_relu = _window(pool), _name(activation) == "relu"
    if is_relu and window and _may_run(norm, x, "max_pool", activation, *between):
        return norm._fused(x, activation="relu", pool=window)
    y: Tensor = pool(norm_add_activation(norm, x, activation, between))
    return y


def add_norm(
    norm: Any, a: Tensor, b: Tensor, *, saves_normalised: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of a + b, and the sum.

    saves_normalised: whether only modules that recompute the norm's result read it.
    """
    if (
        _may_run(norm, a, "sum")
        and isinstance(b, Tensor)
        and not (a.is_nested or b.is_nested)
        and a.shape == b.shape
        and a.is_floating_point()
        and b.is_floating_point()
    ):
        if saves_normalised and recompute.is_possible():
            return norm._fused_add(a, b, saves_normalised=True)
        return norm._fused_add(a, b)
    total = a + b
    return norm(total), total


def modulated_norm(norm: Any, x: Tensor, scale: Any, shift: Any) -> Tensor:
    """Return norm(x) * scale + shift: an adaptive norm, with the one in its scale."""
    y = None
    if isinstance(scale, Tensor) and isinstance(shift, Tensor) and modulates(norm, x):
        y = norm._fused_modulation(x, scale, shift)
    return norm(x) * scale + shift if y is None else y


def modulates(norm: Any, x: Any) -> bool:
    """Whether a norm may run with a scale and a shift. Inductor fuses these without help."""
    if torch.compiler.is_compiling() or not _may_run(norm, x, "modulation"):
        return False
    return can_run.has_kernels("fuse", norm.backend, x)


def convolution_norm(
    norm: Any, convolution: Any, permute: Any, dims: tuple[int, ...], x: Tensor
) -> Tensor:
    """Apply a convolution, move its channels last, and apply a norm that adds the bias.

    permute: the module that permutes to `dims`; None if the forward calls a function.
    """
    # Without the kernels PyTorch's norm runs, and the convolution adds its bias at no cost.
    if (
        _may_run(norm, x, "convolution_bias", convolution, permute)
        and can_run.has_kernels("fuse", norm.backend, x)
        and type(convolution) in CONVOLUTIONS
        and convolution.bias is not None
        and norm.normalized_shape == convolution.bias.shape
        and (permute is None or tuple(permute.dims) == dims)
    ):
        y = convolutions.depthwise(convolution, x)
        if y is None:
            y = convolution._conv_forward(x, convolution.weight, None)
        return norm._fused_bias(y.permute(dims), convolution.bias)
    y = convolution(x)
    return norm(y.permute(dims) if permute is None else permute(y))


def convolve(convolution: Any, x: Tensor) -> Tensor:
    """Apply a depthwise convolution before a norm."""
    y = None if convolution.bias is not None else convolutions.depthwise(convolution, x)
    result: Tensor = convolution(x) if y is None else y
    return result


def fork(convolution: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the convolution at the start of a residual block; return y, and x for the shortcut."""
    results = convolutions.fork(convolution, x)
    return (convolution(x), x) if results is None else results


def _name(activation: Any) -> ActivationLike:
    """The name of an activation; None for a module that now computes another function."""
    return _activations.of_module(activation) if callable(activation) else activation


def _window(pool: nn.Module) -> Pool | None:
    """The window of a max pooling; None if it has a dilation, or if the module does more."""
    if type(pool) is not nn.MaxPool2d or pool.return_indices or has_hooks(pool):
        return None
    sizes: Any = (
        pool.kernel_size,
        pool.stride or pool.kernel_size,
        pool.padding,
        pool.dilation,
    )
    kernel, stride, padding, dilation = (
        (v, v) if isinstance(v, int) else tuple(v) for v in sizes
    )
    pairs = all(len(v) == 2 for v in (kernel, stride, padding))
    return (
        Pool(kernel, stride, padding, pool.ceil_mode)
        if pairs and dilation == (1, 1)
        else None
    )


def _may_run(norm: Any, x: Any, operation: str, *modules: Any) -> bool:
    """Whether one call may run a norm and an operation: a kernel may run, and nothing is skipped.

    modules: what else the fused call replaces. Anything but a module is ignored.
    """
    cls = type(norm)
    sites: FusionSites | None = getattr(cls, "_fusion_sites", None)
    if sites is None or not (operation in sites.before or operation in sites.after):
        return False
    if not isinstance(x, Tensor):
        return False
    if not x.is_cuda and not can_run.has_kernels("fuse", norm.backend, x):
        return False
    for name, method in sites.methods.items():  # inline: calling a function is slower
        if getattr(cls, name) is not method:
            return False
    if norm._probe is not None:
        return False
    for module in (norm, *modules):
        if isinstance(module, nn.Module) and has_hooks(module):
            return False
    return True


def _may_join(norm: Any, x: Tensor, other: Any, residual: Any) -> bool:
    """Whether one call may run two norms whose results are added; norm: one that `_may_run`."""
    return (
        _may_run(other, residual, "norm")
        and _alike(x, residual)
        and norm._may_add(x)
        and other._may_add(residual)
        and norm.group_to_join() is other.group_to_join()
    )


def _alike(x: Tensor, residual: Any) -> bool:
    """Whether a residual has the shape, strides, dtype and device of x, to which it is added.

    With other strides, the memory format of the sum would depend on the order of the operands.
    """
    return (
        isinstance(residual, Tensor)
        and residual.shape == x.shape
        and residual.stride() == x.stride()
        and residual.dtype == x.dtype
        and residual.device == x.device
    )
