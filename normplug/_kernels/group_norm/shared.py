"""What the kernels of planes and of columns share: statistics, gradients.

A *unit* is what has to be read before any of it can be written: in `planes` a group of a sample, in
`columns` a whole sample. There are three ways to read a unit.

- T.held: a program reads it once, into registers.
- Solo: a program reads its tiles twice, the second time in reverse order, mostly from the caches.
- Otherwise it is cut into K tiles. Program t reads tile t and publishes its part of the statistics.
  The last program to publish a part of a unit merges all its parts, in order. Then program t writes
  tile t - LAG (see `waiting`): by then its unit is complete, and it is still in the L2 cache. The
  tiles of a unit are written in reverse order, since the cache holds what was read last.

Backward, programs sum the gradients of weight and bias over space, and publish the sums of each
sample or, T.held, of all their samples. At the end of the grid, further programs add these parts
up, in order.

N samples have G groups of CHANNELS channels. Other arguments are explained in the classes of
`schedule` and in `primitives`.
"""

import triton
import triton.language as tl

from normplug._kernels.activation import activation_gradient
from normplug._kernels.primitives import scalar


@triton.jit
def save_statistics(stats_ptr, groups, live, GROUPS, mean, m2, values, eps, ACC):
    """Save mean and rstd of groups of `values` values each; return rstd."""
    rstd = 1.0 / tl.sqrt(m2 / values + scalar(eps, ACC))
    tl.store(stats_ptr + groups, mean, mask=live)
    tl.store(stats_ptr + GROUPS + groups, rstd, mask=live)
    return rstd


@triton.jit
def load_vector(pointer, channels, live, default, ACC, GIVEN):
    """Load the weight or bias of some channels; if not GIVEN, return `default`."""
    if GIVEN:
        return tl.load(pointer + channels, mask=live, other=0.0).to(ACC)
    else:
        return tl.full(channels.shape, default, ACC)


@triton.jit
def gradient_before(dy, centred, scale, bias, F):
    """Compute dz, the gradient of the activation's input, from the scale and bias of y.

    Out of bounds dy is 0, and so is all that is computed from it.
    """
    dz = dy.to(F.acc)
    if F.activation != 0:
        dz = activation_gradient(dz, centred * scale + bias, F.activation)
    return dz
