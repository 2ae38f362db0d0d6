"""The code that LayerNorm and RMSNorm share, alone and fused."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from normplug import native
from normplug._ops import likely, nested
from normplug._ops.call import call
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.watched import REFUSALS, WatchedRows


class RowNorm(WatchedRows):
    """A norm of rows of shape `_affine_shape`, with statistics that are only watched.

    A subclass declares `_function`, `_spec`, `_by_torch`, and all that `TargetVarianceNorm` asks
    for. Its arguments are those of `WatchedRows`.
    """

    # The name of the function in `normplug.functional`, for errors.
    _function: ClassVar[str]
    # Where an RMSNorm rounds: see `LayerNormSpec.rounding`.
    _rounding: ClassVar[str | None] = None
    _channels_first = False  # whether the input is a view of channels-first images

    _call_reads = (*WatchedRows._call_reads, "normalized_shape")

    def _spec(self, x: Tensor, autocast_output: str) -> LayerNormSpec:
        """The non-tensor arguments of a call with the input x."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, update the watched statistics if there are any."""
        if type(input) is not Tensor or input.is_cuda:
            known = self._run_native(input)
            if known is not None:
                return known
            if isinstance(input, fx.Proxy):
                return self._as_leaf(input)
        weight, bias = self._affine()
        return self._normalise(input, weight, bias, self._normplug.autocast_output)

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        if self._is_plain(input, weight):
            try:
                return self._by_torch(input, weight, bias)
            except REFUSALS:
                pass
        t = Tensors(input, None, weight, bias, None, *self._statistics_to_update(input))
        measures = self._probe is not None  # read first: another thread may unswap the layer
        y = self._run(t, autocast_output)
        if measures:
            self._record(*(nested.rows(t, self._affine_shape()) for t in (input, y)))
        return y

    def _by_torch(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The call by torch's function, if `_is_plain`."""
        raise NotImplementedError

    def _fused_add(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `forward(input + residual)` and the sum, in one call."""
        known = self._run_native(input, residual)
        if known is not None:
            return known
        statistics = self._statistics_to_update(input)
        t = Tensors(input, residual, *self._affine(), None, *statistics)
        return self._run(t, self._normplug.autocast_output)

    _fusion_sites = FusionSites({"forward": forward, "_normalise": _normalise}, before=("sum",))

    def _run(self, t: Tensors, autocast_output: str) -> Any:
        spec, backend = self._spec(t.x, autocast_output), self._normplug.backend
        add = "" if t.residual is None else "add_"
        caller = f"functional.{add}{self._function}"
        # A subclass may override `_normalise`; C++ would then bypass its version.
        plain = type(self)._normalise is RowNorm._normalise
        y = call(caller, t, spec, backend, isolated=self._channels_first)
        if plain and not torch.compiler.is_compiling():
            native.learn(self, spec, backend, t, t.x, t.residual, t.input_bias)
        return y

    def _run_native(
        self, input: Tensor, residual: Tensor | None = None, input_bias: Tensor | None = None
    ) -> Any:
        """Run a call that C++ has learned and return its result; None for any other call."""
        if self._probe is not None or torch.compiler.is_compiling():
            return None
        return native.forward(self, input, residual, input_bias)

    def _likely_call(self) -> likely.Call:
        fields = (
            ("centred", self._measure == "variance"),
            ("weight_offset", self._weight_offset),
            ("rounding", self._rounding),
        )
        return likely.Call(LayerNormSpec, self._affine_shape(), fields)

    def _row_dims(self) -> tuple[int, ...]:
        """The dimensions of an input that form a row."""
        return tuple(range(-len(self._affine_shape()), 0))
