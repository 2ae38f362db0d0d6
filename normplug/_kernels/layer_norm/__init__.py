"""Triton kernels of LayerNorm, and their launches."""
