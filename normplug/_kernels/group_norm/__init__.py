"""Triton kernels of GroupNorm and their launches; only `_ops.group_norm` imports them."""
