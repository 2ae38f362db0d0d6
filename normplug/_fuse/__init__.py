"""Fusion of norms with the operations around them; `_swap` and `adapters` may import it."""
