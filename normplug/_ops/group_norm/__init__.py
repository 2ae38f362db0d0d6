"""GroupNorm, and InstanceNorm as a GroupNorm whose groups are channels."""
