"""What the kernels of several norms share: numbers and their dtypes, pairs of sums, an affine."""

import triton
import triton.language as tl

# Names of numbers that no kernel is to be compiled for: a float64's bits are an integer to Triton.
SCALARS = ("momentum", "eps", "root")


@triton.jit
def scalar(value, ACC: tl.constexpr):
    """A number from the host, which passes a float64 as its bits: Triton takes none."""
    if ACC == tl.float64:
        number = value.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        number = value
    return number


@triton.jit
def as_dtype(value, DTYPE: tl.constexpr):
    """A value in another dtype; float64 is rounded to float32 before half."""
    if value.dtype == tl.float64:
        # Two conditions: Triton 3.3 cannot join them with `or` here.
        if DTYPE == tl.float16:
            value = value.to(tl.float32)
        elif DTYPE == tl.bfloat16:
            value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def as_stored(value, pointer):
    """A value in the dtype that `pointer` points to."""
    return as_dtype(value, pointer.dtype.element_ty)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_both(a, b, AXIS: tl.constexpr):
    """The sums of a and b over an axis, in one exchange between threads."""
    return tl.reduce((a, b), AXIS, _add_pairs)


@triton.jit
def affine(
    rstd, weight_ptr, bias_ptr, channels, live, root,
    BC: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What x - mean is multiplied by, and what is added, for each column."""
    scale = rstd * scalar(root, ACC)
    if WEIGHT:
        scale *= tl.load(weight_ptr + channels, mask=live, other=0.0).to(ACC)
    bias = tl.zeros([BC], ACC)
    if BIAS:
        bias = tl.load(bias_ptr + channels, mask=live, other=0.0).to(ACC)
    return scale, bias
