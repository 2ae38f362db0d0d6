"""The dtype that autocast sets for an input."""

from __future__ import annotations

import torch
from torch import Tensor

# Computed at import: torch.compile of torch 2.6 cannot trace `is_autocast_available`.
_AUTOCAST_DEVICES = frozenset(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(device)
)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast has set for the device of x; None where autocast is off."""
    try:
        device = "cuda" if x.is_cuda else x.device.type
    except AttributeError:  # not a tensor: the checks reject it later
        return None
    if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
