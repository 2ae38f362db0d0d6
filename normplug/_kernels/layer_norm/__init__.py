"""Triton kernels of LayerNorm and their launches; only `_ops` imports them."""
