"""Norms and what stands around them as one kernel; `_swap` and `adapters` may import it."""

from normplug._fuse import legacy

legacy.register()
