"""Triton kernels of LayerNorm and their schedule; only `_ops` imports them."""
