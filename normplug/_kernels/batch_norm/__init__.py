"""Triton kernels of BatchNorm and their launches; only `_ops` imports them."""
