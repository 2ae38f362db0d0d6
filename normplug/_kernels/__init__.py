"""Triton kernels, the schedules that set them up, and their launches; only `_ops` imports them."""
