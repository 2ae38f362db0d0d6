"""The routes of GroupNorm, and of InstanceNorm, which is GroupNorm with one group per channel."""
