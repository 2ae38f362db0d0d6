"""Activations that a kernel applies to the norm's result, and relu's mask packed as bits.

ACTIVATION comes from `_activations.kernel_code`. A negative one is minus leaky relu's slope.
"""

import triton
import triton.language as tl

SILU = tl.constexpr(2)


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)), to a few units in the last place.

    Squaring a reciprocal square root takes half the instructions of a division. With the division,
    SiLU's kernels are bound by instruction issue, and no longer by memory.
    """
    if z.dtype == tl.float64:
        return tl.sigmoid(z)
    else:
        root = tl.math.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))  # -log2(e)
        return root * root


@triton.jit
def activate(z, ACTIVATION):
    """Apply relu, silu, exact gelu, relu6, hardswish or leaky relu to z; nan stays nan."""
    if ACTIVATION < 0:
        return tl.where(z > 0, z, z * -ACTIVATION)
    elif ACTIVATION == 1:
        return tl.where(z <= 0, 0.0, z)
    elif ACTIVATION == 2:
        return z * _sigmoid(z)
    elif ACTIVATION == 3:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == 4:
        return tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif ACTIVATION == 5:
        return tl.where(
            z <= -3, 0.0, tl.where(z >= 3, z, z * (z + 3.0) * 0.16666666666666666)
        )
    else:
        return z


@triton.jit
def activation_gradient(dy, z, ACTIVATION):
    """Return dy times the derivative of the activation at z.

    At 0, relu, relu6 and leaky relu take the derivative from the left. At 6, relu6 takes the
    derivative from the right.
    """
    if ACTIVATION < 0:
        return tl.where(z > 0, dy, dy * -ACTIVATION)
    elif ACTIVATION == 1:
        return tl.where(z <= 0, 0.0, dy)
    elif ACTIVATION == 2:
        gate = _sigmoid(z)
        return dy * gate * (1.0 + z * (1.0 - gate))
    elif ACTIVATION == 3:
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return dy * (0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density)
    elif ACTIVATION == 4:
        return tl.where(z <= 0, 0.0, tl.where(z >= 6, 0.0, dy))
    elif ACTIVATION == 5:
        slope = tl.where(
            z <= -3, 0.0, tl.where(z >= 3, 1.0, z * 0.3333333333333333 + 0.5)
        )
        return dy * slope
    else:
        return dy


@triton.jit
def silu_and_slope(z):
    """silu(z) and its derivative."""
    gate = _sigmoid(z)
    return z * gate, gate * (1.0 + z * (1.0 - gate))


@triton.jit
def pack_mask(z, COUNT):
    """Pack relu's mask of COUNT values, of any shape, into COUNT / 8 bytes, lowest bit first.

    A bit is 1 where relu passes the gradient: at z <= 0 it does not, at nan it does.
    """
    eights = tl.reshape(tl.where(z <= 0, 0, 1).to(tl.int32), [COUNT // 8, 8])
    return tl.sum(eights << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def unpack_mask(packed, COUNT):
    """Unpack COUNT / 8 bytes into COUNT zeros and ones."""
    return tl.reshape(
        (packed.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1, [COUNT]
    )
