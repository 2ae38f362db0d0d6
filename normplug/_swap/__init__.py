"""Swap a model's stock norms for normplug's, and back."""
