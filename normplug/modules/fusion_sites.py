"""How a norm's class declares what its layers can run in one call with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class FusionSites(NamedTuple):
    """What `normplug.fuse` may run in one call with a layer; a class has it as `_fusion_sites`.

    Attributes:
        methods: the methods that the forward consists of, by name. A subclass with another one of
            them is not fused.
        after: what may follow the layer: any of "activation", "addition" (of a residual, before the
            activation) and "max_pool" (after relu). The layer's `fused` takes it.
        before: what may come before the layer: "addition" (of two tensors), which `fused_add`
            takes, and "convolution_bias", which `fused_bias` takes. That one is for layers with a
            `normalized_shape`.
    """

    methods: dict[str, Callable[..., Any]]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def apply_to(self, cls: type) -> bool:
        """Whether the fused methods do what the layers of a class do."""
        for name, method in self.methods.items():  # noqa: SIM110 - a generator is slower
            if getattr(cls, name) is not method:
                return False
        return True
