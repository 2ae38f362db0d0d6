"""What the norms of rows have in common: LayerNorm and RMSNorm, alone and fused."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from normplug import functional, native
from normplug._ops import nested
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.watched import WatchedRows


class RowNorm(WatchedRows):
    """A norm of the rows of `_affine_shape`, with running statistics that are only watched.

    Each declares `_function`, `_spec`, `_variance` and what every norm does. Its arguments are
    those of `WatchedRows`.
    """

    # The name of its function in `normplug.functional`, for errors.
    _function: ClassVar[str]
    _channels_first = False  # whether the input is a view of channels-first images

    _call_reads = (*WatchedRows._call_reads, "normalized_shape")

    def _spec(self, x: Tensor, autocast_output: str) -> LayerNormSpec:
        """All of a call with this input that is not a tensor."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, move the running statistics."""
        known = self._known(input)
        if known is not None:
            return known
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        return self._normalise(input, *self._affine(), self.autocast_output)

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        t = Tensors(input, None, weight, bias, None, *self._statistics_to_move(input))
        y = self._run(t, autocast_output)
        if self._probe is not None:
            self._record(*(nested.rows(t, self._affine_shape()) for t in (input, y)))
        return y

    def fused_add(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` returns for input + residual, and that sum, in one call."""
        known = self._known(input, residual)
        if known is not None:
            return known
        statistics = self._statistics_to_move(input)
        t = Tensors(input, residual, *self._affine(), None, *statistics)
        return self._run(t, self.autocast_output)

    _fusion_sites = FusionSites(
        {"forward": forward, "_normalise": _normalise}, before=("addition",)
    )

    def _run(self, t: Tensors, autocast_output: str) -> Any:
        spec = self._spec(t.x, autocast_output)
        add = "" if t.residual is None else "add_"
        caller = f"functional.{add}{self._function}"
        y = functional.carry_out(caller, t, spec, self.backend, single=self._channels_first)
        # A subclass may normalise in another way than its `forward` without it.
        plain = type(self)._normalise is RowNorm._normalise
        if plain and self._probe is None and not torch.compiler.is_compiling():
            native.learn(self, spec, self.backend, t, t.x, t.residual, t.input_bias)
        return y

    def _known(
        self, input: Tensor, residual: Tensor | None = None, input_bias: Tensor | None = None
    ) -> Any:
        """The result of a call that C++ knows; else None."""
        if torch.compiler.is_compiling():
            return None
        return native.forward(self, input, residual, input_bias)

    def _row_dims(self) -> tuple[int, ...]:
        """The dimensions of an input that make a row."""
        return tuple(range(-len(self._affine_shape()), 0))
