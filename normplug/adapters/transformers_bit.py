"""The GroupNorm with an activation of `transformers.models.bit`."""

from __future__ import annotations

from torch import Tensor, fx, nn
from transformers.models.bit import modeling_bit

from normplug import _activations, modules
from normplug._torch import GLOBAL_HOOKS, has_hooks


class BitGroupNormActivation(modules.GroupNorm, modeling_bit.BitGroupNormActivation):
    """`BitGroupNormActivation` that normalises to a target variance."""

    activation: nn.Module

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Normalise `hidden_state`, then apply the layer's own `activation`."""
        if isinstance(hidden_state, fx.Proxy):
            return self._as_leaf(hidden_state)
        plain = self._probe is None and not any(GLOBAL_HOOKS) and not has_hooks(self.activation)
        name = _activations.of_module(self.activation) if plain else None
        y = self._fused(hidden_state, activation=name)
        if self._probe is not None:
            self._record(hidden_state, y)
        return self.activation(y) if name is None else y


adapt = {modeling_bit.BitGroupNormActivation: BitGroupNormActivation}.get
