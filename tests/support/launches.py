"""The launches of a forward and a backward, for tests that compile their kernels."""

import torch
from triton.backends.compiler import GPUTarget

from normplug._kernels import launch
from normplug._kernels.batch_norm import launches as batch_norm
from normplug._kernels.batch_norm import schedule as bn
from normplug._kernels.batch_norm import windows
from normplug._kernels.group_norm import launches as group_norm
from normplug._kernels.group_norm import schedule as gn
from normplug._kernels.layer_norm import launches as layer_norm
from normplug._kernels.layer_norm import schedule as ln
from normplug._kernels.layer_norm.launches import Strides
from normplug.reference import accumulator_dtype

SMS, SHARED = 132, 227 << 10  # an H100's
H100 = GPUTarget("cuda", 90, 32)


class Driver:
    """A driver that reports an H100, which need not exist."""

    def get_current_target(self):
        return H100

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def batch_norm_launches(shape, dtype, residual, sms=SMS, **options):
    forward, backward = (
        bn.geometry(*shape, dtype.itemsize, tensors, sms, launch.COOPERATIVE) for tensors in (1, 2)
    )
    flags = batch_norm.Flags(residual=residual, running=True, tracked=True, **options)
    yield batch_norm.forward_launch(forward, dtype, flags, 0.1, 1e-5, 0.6)
    yield batch_norm.backward_launch(backward, dtype, flags, (True, True, True, residual), 0.6)


def pool_launches(dtype):
    shape = bn.pixels(64, 56, 64, dtype.itemsize)
    window = ((3, 3), (2, 2), (1, 1)), (112, 112), (56, 56)
    sizes, given = (shape, dtype, *window, 0.6), {"TRAINING": True, "WEIGHT": True}
    forward, backward = windows.batch_norm_pool_forward, windows.batch_norm_pool_backward
    yield batch_norm.pool_launch(forward, *sizes, eps=1e-5, BIAS=True, KEEP=True, **given)
    yield batch_norm.pool_launch(backward, *sizes, JOINED=True, **given)


def merge_launch(dtype):
    flags = batch_norm.Flags(running=True, tracked=True)
    return batch_norm.merge_launch(3, 512, dtype, flags, 0.1, 1e-5)


def row_launches(rows, width, itemsize, dtype, spacing, sms=SMS, shared=SHARED):
    """dtype: of the sums. spacing: of the rows of x and of dy."""
    forward = ln.layer_norm_forward(rows, width, 8, itemsize, True, sms)
    backward = ln.layer_norm_backward(
        rows, width, 8, itemsize, False, sms, shared, launch.COOPERATIVE
    )
    flags = layer_norm.Flags(input_bias=False, residual=True, running=True, tracked=True)
    strides = Strides(spacing, residual=width)
    yield layer_norm.forward_launch(forward, dtype, flags, strides, 0.1, 1e-5, 0.6)
    strides = Strides(width, dy=spacing, dtotal=width)
    yield layer_norm.backward_launch(
        backward, dtype, layer_norm.Flags(), strides, (True, True, True, False), 0.6
    )


def group_norm_launches(shape, dtype, sms=SMS):
    acc = accumulator_dtype(dtype)
    flags = group_norm.Flags(activation=("leaky_relu", 0.2) if dtype == torch.float64 else "silu")
    forward = gn.group_norm_forward(*shape, dtype.itemsize, sms)
    yield group_norm.forward_launch(forward, acc, flags, 1e-5, 0.6)
    backward = gn.group_norm_backward(*shape, dtype.itemsize, sms)
    yield group_norm.backward_launch(backward, acc, flags, (True, True, True), 0.6)
