"""The routes of LayerNorm: PyTorch's kernels, normplug's, and normplug's for compilers."""
