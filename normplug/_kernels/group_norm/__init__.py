"""Triton kernels of GroupNorm and their schedule; only `_ops` imports them."""
