"""Triton kernels of LayerNorm and their launches; only `_ops.layer_norm` imports them."""
