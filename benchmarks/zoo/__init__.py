"""Check that a swap is right in the architectures of other libraries: `python benchmarks/zoo`."""
