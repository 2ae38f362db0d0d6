"""The dtype that autocast asks for."""

from __future__ import annotations

import torch
from torch import Tensor

# Asked here, once: torch.compile of torch 2.6 cannot trace the question.
_AUTOCAST_DEVICES = frozenset(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(device)
)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast has set where x is; None where it is off."""
    try:
        device = "cuda" if x.is_cuda else x.device.type
    except AttributeError:  # no tensor, and about to be refused
        return None
    if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
