"""LayerNorm by torch's operations and by normplug's kernels, eager and for compilers."""
