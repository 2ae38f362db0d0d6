"""Norms and what stands around them as one kernel; `_swap` and `adapters` may import it."""

from normplug._fuse import legacy  # noqa: F401 - it makes modules that pickles ask for
