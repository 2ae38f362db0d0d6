"""Fusion of norms with the operations around them; `_swap` and `adapters` may import it."""

from normplug._fuse import legacy  # noqa: F401 - it makes modules that pickles name
