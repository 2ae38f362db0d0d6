"""Tools for norms and their statistics: freeze, recalibrate, watch and examine them."""
