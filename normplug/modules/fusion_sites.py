"""How a norm's class declares the operations that its layers can fuse with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class FusionSites(NamedTuple):
    """The operations that `normplug.fuse` may run in one call with a layer: `_fusion_sites`.

    Attributes:
        methods: the methods that the forward consists of, by name. A subclass that overrides one
            of them is not fused.
        after: operations after the layer: any of "activation", "addition" (of a residual, before
            the activation) and "max_pool" (after relu). The layer's `_fused` runs them.
        before: operations before the layer: "addition" (of two tensors), which `_fused_add` runs,
            and "convolution_bias", which `_fused_bias` runs. The latter is for layers with a
            `normalized_shape`.
    """

    methods: dict[str, Callable[..., Any]]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def apply_to(self, cls: type) -> bool:
        """Whether the fused methods compute what layers of `cls` do: no method is overridden."""
        for name, method in self.methods.items():  # noqa: SIM110 - a generator is slower
            if getattr(cls, name) is not method:
                return False
        return True
