"""The routes of BatchNorm: PyTorch's kernels, normplug's, and normplug's for compilers."""
