"""Measure what norms cost: `python -m normplug.bench`, or `measure` for a model of your own."""

from normplug.bench.models import measure
from normplug.bench.rows import Rows

__all__ = ["Rows", "measure"]
