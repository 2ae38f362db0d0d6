"""Whether kernels can run: here and now, on this device, with these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops.spec import Tensors
from normplug._torch import (
    dispatch_modes,
    in_forward_ad,
    is_exporting,
    is_tracing,
    transforms_active,
)

_HAS_TRITON = find_spec("triton") is not None  # imported only when a kernel is needed
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_asked_for(backend: str, x: Tensor) -> bool:
    """Whether this backend uses the kernels on x if they can run."""
    return backend == "triton" or (backend == "auto" and x.is_cuda)


def is_compiling() -> bool:
    """Whether a compiler is tracing the call, so that kernels have to be called as operators."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0


def size_of(x: Tensor) -> int:
    """The size of a tensor's values, in bytes."""
    return x.numel() * x.element_size()


def has_kernels(caller: str, backend: str, x: Tensor) -> bool:
    """Whether a norm with this backend can use kernels on the device of x."""
    if not is_asked_for(_checks.backend(caller, backend), x):
        return False
    return refusal_now() is None and refusal_of_device(x) is None


def refusal_now() -> str | None:
    """Why no kernel can run now, whatever the tensors; None if one may."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if transforms_active():
        return "a torch.func transform is active"
    if is_tracing():
        return "torch.jit.trace records torch's operations only"
    if in_forward_ad():
        return "forward-mode differentiation is active"
    if is_exporting():
        return "torch.export is tracing, for machines that may have no GPU"
    return None


def refusal_of_device(x: Tensor, *others: Tensor) -> str | None:
    """Why no kernel can run on the device of x, with these tensors; None if one can."""
    from normplug._kernels.launch import BUILDS, INTERPRETED

    if not x.is_cuda:
        if INTERPRETED and x.device.type == "cpu":
            return None
        return f"the input is on {x.device}, and the kernels need a CUDA device"
    if not BUILDS:
        return "the kernels need Triton 3.3, which comes with torch 2.7, or newer"
    capability = torch.cuda.get_device_capability(x.device)
    return refusal_of_capability(capability, [each.dtype for each in (x, *others)])


def refusal_of_capability(
    capability: tuple[int, int], dtypes: Sequence[torch.dtype]
) -> str | None:
    """Why a GPU of this compute capability cannot run kernels on these dtypes; None if it can."""
    if capability < (7, 5):
        return "the kernels need a GPU of compute capability 7.5 or more"
    if capability < (8, 0) and torch.bfloat16 in dtypes:
        return "bfloat16 needs a GPU of compute capability 8.0 or more"
    return None


def refusal_of(t: Tensors, strided: bool = False) -> str | None:
    """Why no kernel can take these tensors; None if one may.

    strided: whether the weight and the bias may have any strides.
    """
    x, residual, weight, bias, *others, tracked = t
    vectors = [v for v in (weight, bias) if v is not None]
    dense = [v for v in (*others, tracked) if v is not None]
    present = [*vectors, *dense] if residual is None else [residual, *vectors, *dense]
    dense = dense if strided else [*vectors, *dense]
    if tracked is not None and tracked.dtype != torch.int64:
        return f"num_batches_tracked is {tracked.dtype}, not torch.int64"
    for each in (x, *present):
        if type(each) not in (Tensor, torch.nn.Parameter):
            return f"a tensor is a {type(each).__name__}, which the kernels cannot read"
    if (why := refusal_of_device(x, *present)) is not None:
        return why
    if x.dtype not in _DTYPES:
        return f"the input is {x.dtype}, which the kernels do not support"
    if x.numel() == 0:
        return "the input is empty"
    # Dynamo cannot trace `is_neg`.
    if not torch.compiler.is_compiling() and any(each.is_neg() for each in (x, *present)):
        return "a tensor is negated lazily"
    if any(each.device != x.device for each in present):
        return f"not every tensor is on {x.device}, where the input is"
    if not all(each.is_contiguous() for each in dense):
        return "a weight, a bias or a running statistic is not contiguous"
    return None


def is_too_long(*lengths: int) -> bool:
    """Whether an axis is longer than what the kernels can index."""
    from normplug._kernels import LONGEST_AXIS

    return max(lengths) > LONGEST_AXIS
