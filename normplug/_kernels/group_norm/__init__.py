"""Triton kernels of GroupNorm and their launches; only `_ops` imports them."""
