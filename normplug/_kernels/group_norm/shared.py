"""What the kernels of planes and of columns share: arguments, statistics, gradients.

A *unit* is what has to be read before any of it can be written: in `planes` a group of a sample, in
`columns` a whole sample. There are two ways to read a unit.

- HELD: a program reads it once, into registers.
- Otherwise it is cut into K tiles. Program t reads tile t and publishes its part of the statistics.
  The last program to publish a part of a unit merges all its parts, in order. Then program t writes
  tile t - LAG (see `waiting`): by then its unit is complete, and it is still in the L2 cache. The
  tiles of a unit are written in reverse order, since the cache holds what was read last.

Backward, programs sum the gradients of weight and bias over space, and publish the sums of each
sample or, HELD, of all their samples. At the end of the grid, further programs add these parts up,
in order.

The arguments of all four kernels.

Sizes. They are not compiled in, so another batch size needs no other kernel.
    N, G: batch size, and groups of a sample.
    CHANNELS: channels of a group.
    K: tiles of a unit; in `columns`, items of a slab.
    LAG: the writes begin so many programs after the first reads.
    SPLITS: programs that share the samples of a held unit, backward.

Scalars.
    root: square root of the target variance.

Constants: how the work is cut.
    UNIT: divides the sizes that are given in units, so that the compiler sees the alignment.
    HELD: a program holds a unit.
    FINISH: channels of a gradient that one program adds up.
    FAN_IN: parts of a gradient that a program adds at a time.
    ACC: the dtype to compute in: float32, or float64 if a tensor is float64.
    EVEN: every tile is full.
    WIDE: offsets need 64 bits.

Constants: what the call has or asks for.
    WEIGHT, BIAS: there is one, and it is needed.
    ACTIVATION: see `activation`.
    DX, DWEIGHT, DBIAS: this gradient is wanted.
"""

import triton
import triton.language as tl

from normplug._kernels.activation import activation_gradient
from normplug._kernels.primitives import scalar


@triton.jit
def save_statistics(stats_ptr, groups, live, GROUPS, mean, m2, values, eps, ACC: tl.constexpr):
    """Save mean and rstd of groups of `values` values each; return rstd."""
    rstd = 1.0 / tl.sqrt(m2 / values + scalar(eps, ACC))
    tl.store(stats_ptr + groups, mean, mask=live)
    tl.store(stats_ptr + GROUPS + groups, rstd, mask=live)
    return rstd


@triton.jit
def load_statistics(stats_ptr, groups, live, GROUPS):
    """Mean and rstd of groups, which another program may have saved."""
    mean = tl.load(stats_ptr + groups, mask=live, other=0.0, cache_modifier=".cg")
    rstd = tl.load(stats_ptr + GROUPS + groups, mask=live, other=0.0, cache_modifier=".cg")
    return mean, rstd


@triton.jit
def load_vector(pointer, channels, live, default, ACC: tl.constexpr, GIVEN: tl.constexpr):
    """Load the weight or bias of some channels; if not GIVEN, return `default`."""
    if GIVEN:
        vector = tl.load(pointer + channels, mask=live, other=0.0).to(ACC)
    else:
        vector = tl.full(channels.shape, default, ACC)
    return vector


@triton.jit
def gradient_before(dy, centred, scale, bias, ACC: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute dz, the gradient of the activation's input, in ACC, from the scale and bias of y.

    Out of bounds dy is 0, and so is all that is computed from it.
    """
    dz = dy.to(ACC)
    if ACTIVATION != 0:
        dz = activation_gradient(dz, centred * scale + bias, ACTIVATION)
    return dz


@triton.jit
def publish_sums(
    sums_ptr, part, channels, live, C, sum_dz, sum_dz_xhat,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """Store sums of some channels in a part, which has a row of C sums per wanted gradient."""
    part_ptr = sums_ptr + (part * (DWEIGHT + DBIAS)).to(tl.int64) * C
    if DWEIGHT:
        tl.store(part_ptr + channels, sum_dz_xhat, mask=live)
        part_ptr += C
    if DBIAS:
        tl.store(part_ptr + channels, sum_dz, mask=live)
