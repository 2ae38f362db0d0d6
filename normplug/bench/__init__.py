"""What norms cost on a GPU, next to what torch has: `python -m normplug.bench`."""
