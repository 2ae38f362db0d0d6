"""A tool that measures the cost of norms on a GPU against torch (`python -m normplug.bench`).

It imports the library and `_report`; no other part of the package imports it.
"""
