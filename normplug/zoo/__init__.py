"""Whether a swap is right in the architectures of other libraries: `python -m normplug.zoo`."""
