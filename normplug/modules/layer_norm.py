"""LayerNorm with a target variance and running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from normplug import _checks, functional, native, reference
from normplug._ops import nested
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug.modes import ModeLike
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.watched import WatchedRows


class LayerNorm(WatchedRows, nn.LayerNorm):
    """`torch.nn.LayerNorm` that normalises to a target variance and watches its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    The running statistics are scalars: moving averages of the rows' mean and of their biased
    variance. They are saved, and no result depends on them. A strict load accepts a checkpoint
    without them. They then start again, with mean 0 and variance 1, as they do when the layer
    leaves the meta device. Inside `torch.func` transforms they do not move.

    Args:
        *args: those of `torch.nn.LayerNorm`.
        mode, backend: as in `BatchNorm1d`.
        track_running_stats: carry the running statistics.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional.layer_norm`.
        **kwargs: those of `torch.nn.LayerNorm`.

    Shape: (*rows, *normalized_shape), in and out. Details: `normplug.functional.layer_norm`.

    Raises:
        ValueError: an unknown mode, backend or autocast_output, an eps below 0, an empty row, or
            input of another trailing shape.
        TypeError: an argument of another type.

    Example:
        >>> LayerNorm(8, mode=0.5)
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, ..., mode=0.5)
    """

    autocast_output: str
    _channels_first = False  # whether the input is a view of channels-first images

    _settings = (*WatchedRows._settings, "autocast_output")

    def __init__(
        self,
        *args: Any,
        mode: ModeLike = "golden",
        backend: str = "auto",
        track_running_stats: bool = True,
        momentum: float | None = 0.1,
        autocast_output: str = "float32",
        **kwargs: Any,
    ) -> None:
        caller = type(self).__name__
        _checks.momentum(caller, momentum, None, moves=False)
        _checks.flags(caller, track_running_stats=track_running_stats)
        _checks.autocast_output(caller, autocast_output)
        super().__init__(*args, mode=mode, backend=backend, **kwargs)
        self.autocast_output = autocast_output
        self.track_running_stats = track_running_stats
        self.momentum = momentum
        self.register_statistics(kwargs.get("device"))

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
            self._record(*(nested.rows(t, self.normalized_shape) for t in (input, y)))
        return y

    def fused_add(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` returns for input + residual, and that sum, in one call."""
        known = self._known(input, residual)
        if known is not None:
            return known
        statistics = self._statistics_to_move(input)
        t = Tensors(input, residual, *self._affine(), None, *statistics)
        return self._run(t, self.autocast_output)

    def fused_bias(self, input: Tensor, input_bias: Tensor) -> Tensor:
        """What `forward` returns for input + input_bias, in one call."""
        known = self._known(input, None, input_bias)
        if known is not None:
            return known
        statistics = self._statistics_to_move(input)
        t = Tensors(input, None, *self._affine(), input_bias, *statistics)
        return self._run(t, self.autocast_output)

    _fusion_sites = FusionSites(
        {"forward": forward, "_normalise": _normalise}, before=("addition", "convolution_bias")
    )

    def _run(self, t: Tensors, autocast_output: str) -> Any:
        autocast = functional.autocast_dtype(t.x)
        spec = LayerNormSpec(
            self.normalized_shape,
            self.momentum,
            self._eps,
            self.target_variance,
            autocast,
            autocast_output,
        )
        name = "functional.layer_norm" if t.residual is None else "functional.add_layer_norm"
        y = functional._layer_norm(name, t, spec, self.backend, channels_first=self._channels_first)
        # A subclass may normalise in another way than its `forward` without it.
        plain = type(self)._normalise is LayerNorm._normalise
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

    _call_reads = (
        *WatchedRows._call_reads,
        "momentum",
        "normalized_shape",
        "autocast_output",
    )

    def _affine_shape(self) -> tuple[int, ...]:
        return self.normalized_shape

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        return reference.layer_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.bias,
            eps=self._eps,
            target_variance=self.target_variance,
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        dims = tuple(range(-len(self.normalized_shape), 0))
        return x.var(dims, correction=0).mean()

    def _without_affine(self, x: Tensor, *statistics: Tensor) -> Tensor:
        return functional.layer_norm(
            x,
            self.normalized_shape,
            eps=self._eps,
            mode=self.target_variance,
            backend=self.backend,
        )
