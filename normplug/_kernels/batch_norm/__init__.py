"""Triton kernels of BatchNorm and their schedule; only `_ops` imports them."""
