"""Norm layers of other libraries that a swap can take: what they add to torch's, kept.

Each module here imports its library, and is imported only when a layer of that library is met.
"""
