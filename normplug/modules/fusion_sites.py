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
        before: operations before the layer: "sum" (of two tensors), which `_fused_add` runs, and
            "convolution_bias", which `_fused_bias` runs. The latter is for layers with a
            `normalized_shape`.
        measures: whether these methods measure for a `VarianceLogger`, as the forward does.
    """

    methods: dict[str, Callable[..., Any]]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    measures: bool = False
