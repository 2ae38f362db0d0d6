"""Triton kernels of BatchNorm, and their launches."""
