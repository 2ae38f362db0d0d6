"""Triton kernels, the tables that set them up, and the way they are launched."""
