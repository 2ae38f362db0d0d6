"""What `bench`, `compare` and `experiment` share: files, tables, figures, intervals, provenance.

It imports no tool. The library imports it only where it draws or writes a report.
"""
