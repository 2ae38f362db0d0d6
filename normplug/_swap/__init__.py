"""Swap a model's stock norms for normplug's, and back.

Built on `modules`, `_convert` and `_fuse`; `normplug` and `lightning` import it.
"""
