"""Whether calling a module does anything beside its class's forward: who fuses must ask."""

from __future__ import annotations

from torch import nn

from normplug._torch import has_global_hooks

__all__ = ["has_global_hooks", "has_hooks"]


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens when a module is called beside its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )
