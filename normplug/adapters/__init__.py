"""Norm layers of other libraries that a swap can take; each keeps what it adds to torch's.

Each module imports its library, and is imported by `normplug._convert` when a class of that library
is met, or by pickle. Its `adapt(cls)` gives the normplug class of exactly that class, or None.
"""
