"""Runs and their measures; their statistics, report and plots: see `normplug.compare`."""
