"""Norm layers of other libraries that `swap` supports; each keeps what it adds to torch's.

Each module imports its library. `normplug._convert` imports the module when a model has a class of
that library, and pickle does, too. Its `adapt(cls)` returns the normplug class for exactly that
class, or why the class stays, or None.
"""
