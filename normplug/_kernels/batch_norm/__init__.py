"""Triton kernels of BatchNorm and their launches; only `_ops.batch_norm` imports them."""
