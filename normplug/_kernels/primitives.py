"""What the kernels of several norms share: arguments, scalars, dtypes, running statistics, sums.

A kernel's arguments are tensors, whose names end in `_ptr`; numbers; and two constants: see
`constants`. Sizes, such as N or ROWS, are numbers: they are not compiled in, so a new batch size
needs no new kernel. The size X_UNITS is X / unit, where unit is a constant divisor, so that the
compiler sees the alignment. root is the square root of the target variance.

How the work is cut is explained in the classes of the schedules, whose attributes have the names of
sizes in lower case.
"""

import inspect

import triton
import triton.language as tl

from normplug._kernels.constants import KernelConstant

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])  # of Triton
SCALARS = ("momentum", "eps", "root")  # the arguments that `scalar` decodes


def _field(constant, name):
    """A field of a `KernelConstant` that a `constexpr` holds."""
    value = vars(constant).get("value")
    if isinstance(value, KernelConstant):
        return getattr(value, name)
    raise AttributeError(name)


# Since 3.4, Triton itself reads the attributes of what a constexpr holds.
if VERSION < (3, 4):
    tl.constexpr.__getattr__ = _field


def kernel(function):
    """Decorate a kernel as `triton.jit` does, but so that no number is compiled in.

    By default, Triton compiles another kernel for an integer that is 1 or divisible by 16.
    """
    parameters = inspect.signature(function).parameters
    numbers = [name for name in [*parameters][:-2] if not name.endswith("_ptr")]
    return triton.jit(function, do_not_specialize=numbers)


@triton.jit
def scalar(value, ACC):
    """Decode a number from the host, which passes a float64 as bits: kernels take no float64."""
    return value.to(tl.int64).to(tl.float64, bitcast=True) if ACC == tl.float64 else value


@triton.jit
def as_dtype(value, DTYPE):
    """Convert to another dtype; float64 is rounded to float32 before float16 or bfloat16."""
    if value.dtype == tl.float64:
        # Two conditions: Triton 3.3 cannot join them with `or` here.
        if DTYPE == tl.float16:
            value = value.to(tl.float32)
        elif DTYPE == tl.bfloat16:
            value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def as_stored(value, pointer):
    """Convert to the dtype that `pointer` points to."""
    return as_dtype(value, pointer.dtype.element_ty)


@triton.jit
def update_running(running_ptr, old, value, step, mask=None):
    """Move a running statistic from `old`, as loaded, by one step towards `value`."""
    old = old.to(value.dtype)
    tl.store(running_ptr, as_stored(old + step * (value - old), running_ptr), mask=mask)


@triton.jit
def is_finite(mean, m2):
    """Whether a batch's moments are neither infinite nor nan."""
    return (tl.abs(mean) < float("inf")) & (tl.abs(m2) < float("inf"))


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_both(a, b, AXIS):
    """Sum a and b over an axis, in one exchange between threads."""
    return tl.reduce((a, b), AXIS, _add_pairs)


@triton.jit
def load_both(pointer, places, live, COUNT):
    """Load two numbers per place, COUNT apart, which another program may have stored."""
    a = tl.load(pointer + places, mask=live, other=0.0, cache_modifier=".cg")
    b = tl.load(pointer + COUNT + places, mask=live, other=0.0, cache_modifier=".cg")
    return a, b
