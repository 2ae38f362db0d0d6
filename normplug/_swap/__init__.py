"""A model of stock norms to one of normplug's and back.

Built on `modules`, `_convert` and `_fuse`; `normplug` and `lightning` import it.
"""
