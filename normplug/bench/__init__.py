"""A tool: what norms cost on a GPU, next to what torch has (`python -m normplug.bench`).

It imports the library and `_report`; nothing imports it.
"""
