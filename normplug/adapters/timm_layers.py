"""The norms of `timm.layers`.

The output's dtype under autocast is that of `swap(autocast_output=...)`, as for every other layer,
whether or not timm's fast norm is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.layers import activations, norm, norm_act
from torch import Tensor, fx, nn

from normplug import _activations, modules
from normplug._torch import GLOBAL_HOOKS, has_hooks
from normplug.adapters import ChannelsFirstLayerNorm, Float32, define
from normplug.modules.row_norm import RowNorm


class _FusedActivation(modules.TargetVarianceNorm):
    """Norm and activation as one call if there is no dropout and neither module has hooks."""

    _fused: Callable[..., Tensor]
    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, then apply the layer's own `drop` and `act`."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        sites: Any = self._fusion_sites
        unmeasured = self._probe is not None and not sites.measures
        name = None if unmeasured else _fused_activation(self.drop, self.act)
        y = self._fused(input, activation=name)
        if unmeasured:
            self._record(input, y)
        return self.act(self.drop(y)) if name is None else y


class BatchNormAct2d(_FusedActivation, modules.batch_norm._BatchNorm, norm_act.BatchNormAct2d):
    """`timm.layers.BatchNormAct2d` that normalises to a target variance."""


class SyncBatchNormAct2d(modules.sync_batch_norm._SyncBatchNormForward, BatchNormAct2d):
    """`BatchNormAct2d` over the joined batch of all processes, as `normplug.SyncBatchNorm`."""


BatchNormAct2d._synchronised = SyncBatchNormAct2d


def _fused_activation(drop: nn.Module, act: nn.Module) -> _activations.ActivationLike:
    """The activation that `drop` and `act` amount to, by name; None if they must be called."""
    if type(drop) is not nn.Identity or any(GLOBAL_HOOKS) or has_hooks(drop) or has_hooks(act):
        return None
    # timm's GELU is torch's exact GELU; its `inplace` does nothing.
    return "gelu" if type(act) is activations.GELU else _activations.of_module(act)


class WithActivation(RowNorm):
    """A norm of rows, then the layer's own dropout and activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, then apply the layer's own `drop` and `act`."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        return self.act(self.drop(super().forward(input)))


_ADAPTED = {
    norm_act.BatchNormAct2d: BatchNormAct2d,
    **define(
        globals(),
        norm,
        {
            "GroupNorm": (modules.GroupNorm,),
            "GroupNorm1": (modules.GroupNorm,),
            "LayerNorm": (modules.LayerNorm,),
            "LayerNorm2d": (ChannelsFirstLayerNorm,),
            "LayerNormExp2d": (ChannelsFirstLayerNorm,),
            "LayerNormFp32": (Float32, modules.LayerNorm),
            "LayerNorm2dFp32": (Float32, ChannelsFirstLayerNorm),
        },
    ),
    **define(
        globals(),
        norm_act,
        {
            "GroupNormAct": (_FusedActivation, modules.GroupNorm),
            "GroupNorm1Act": (_FusedActivation, modules.GroupNorm),
            "LayerNormAct": (WithActivation, modules.LayerNorm),
            "LayerNormAct2d": (WithActivation, ChannelsFirstLayerNorm),
            "LayerNormActFp32": (WithActivation, Float32, modules.LayerNorm),
            "LayerNormAct2dFp32": (WithActivation, Float32, ChannelsFirstLayerNorm),
        },
    ),
}


def adapt(cls: type[nn.Module]) -> type[modules.TargetVarianceNorm] | str | None:
    """The normplug class of a norm of `timm.layers`; None or the reason if it stays."""
    if cls.__name__.startswith(("RmsNorm", "SimpleNorm")):
        from normplug.adapters import timm_rms_norms  # older versions of timm lack some of these

        return timm_rms_norms.adapt(cls)
    return _ADAPTED.get(cls)
