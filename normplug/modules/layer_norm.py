"""LayerNorm with a target variance and running statistics."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from normplug import _checks, functional
from normplug._ops import nested
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug.modes import ModeLike, target_variance
from normplug.modules.base import TargetVarianceNorm
from normplug.reference import accumulator_dtype

# LayerNorm's running statistics, and what each is before the first batch.
_START = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
LAYER_NORM_STATISTICS = tuple(_START)


class LayerNorm(TargetVarianceNorm, nn.LayerNorm):
    """`torch.nn.LayerNorm` that normalises to a target variance and watches its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    The running statistics are scalars: moving averages of the rows' mean and of their biased
    variance. They are saved, and no result depends on them. They start again, with mean 0 and
    variance 1, where a checkpoint without them is loaded, which a strict load forgives, and where
    the layer leaves the meta device. Inside `torch.func` transforms they stand still.

    Args:
        *args: those of `torch.nn.LayerNorm`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch"; the environment's `NORMPLUG_BACKEND` sets "auto".
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

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    _channels_first = False  # whether what it normalises is a view of images that are

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
        who = "LayerNorm"
        _checks.layer(who, super().__init__, args, kwargs)
        _checks.momentum(who, momentum, None, moves=False)
        _checks.flags(who, track_running_stats=track_running_stats)
        super().__init__(*args, **kwargs)
        self.target_variance = target_variance(mode)
        _checks.backend(who, backend)
        self.backend = backend
        _checks.autocast_output(who, autocast_output)
        self.autocast_output = autocast_output
        self.track_running_stats = track_running_stats
        self.momentum = momentum
        self.register_statistics(
            kwargs.get("device") if self.weight is None else self.weight.device
        )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, move the running statistics."""
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

    def fused(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` makes of input + residual, and that sum, in one call.

        Args:
            input: as in `forward`.
            residual: as in `normplug.functional.add_layer_norm`.
        """
        statistics = self._statistics_to_move(input)
        t = Tensors(input, residual, *self._affine(), None, *statistics)
        return self._run(t, self.autocast_output)

    def fused_bias(self, input: Tensor, input_bias: Tensor) -> Tensor:
        """What `forward` makes of input + input_bias, in one call.

        Args:
            input: as in `forward`.
            input_bias: as in `normplug.functional.layer_norm`.
        """
        statistics = self._statistics_to_move(input)
        t = Tensors(input, None, *self._affine(), input_bias, *statistics)
        return self._run(t, self.autocast_output)

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
        return functional._layer_norm(
            name, t, spec, self.backend, channels_first=self._channels_first
        )

    def _statistics_to_move(
        self, input: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The running statistics, where `input` is; Nones where a forward leaves them alone."""
        statistics = self._statistics() if self.training else (None, None, None)
        mean = statistics[0]
        # torch.func transforms refuse writes to captured tensors, and stock LayerNorm has none.
        if mean is None or torch._C._are_functorch_transforms_active():
            return None, None, None
        try:
            device = input.device
        except AttributeError:  # no tensor, and about to be refused
            return statistics
        if mean.device != device:
            # Without weight and bias nothing told the layer where its inputs live.
            self._move_statistics(device)
            return self._statistics()
        return statistics

    def reset_parameters(self) -> None:
        """As the torch class, and forget the running statistics."""
        super().reset_parameters()
        if "running_mean" in self._buffers:  # the torch constructor calls this before there are any
            self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forget what was watched: mean 0, variance 1, no batches."""
        if self._lacks_values():
            parameter = next(self.parameters(), None)
            self._start_on("cpu" if parameter is None else parameter.device)
            return
        for name, start in _START.items():
            if (buffer := getattr(self, name)) is not None:
                buffer.fill_(start)

    def extra_repr(self) -> str:
        """The torch class's line, the statistics' settings, and the mode."""
        line, mode = super().extra_repr().rsplit(", ", 1)
        track, momentum = self.track_running_stats, self.momentum
        return f"{line}, momentum={momentum}, track_running_stats={track}, {mode}"

    def register_statistics(self, device: Any = None) -> None:
        """Give the layer fresh running statistics, or None in their place where it tracks none."""
        double = self.weight is not None and self.weight.dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        for name, start in _START.items():
            value = None
            if self.track_running_stats:
                kind = torch.long if name == "num_batches_tracked" else dtype
                with torch.inference_mode(False):  # they are written to in training
                    value = torch.full((), start, device=device, dtype=kind)
            self.register_buffer(name, value)

    def _move_statistics(self, device: torch.device) -> None:
        if self._lacks_values():
            self._start_on(device)
            return
        with torch.inference_mode(False):
            for name in LAYER_NORM_STATISTICS:
                if (buffer := getattr(self, name)) is not None:
                    setattr(self, name, buffer.to(device))

    def _lacks_values(self) -> bool:
        """Whether the statistics are on the meta device still, and no parameter is."""
        mean = self._buffers.get("running_mean")
        if mean is None or not mean.is_meta:
            return False
        parameter = next(self.parameters(), None)  # asking for `weight` may compute it
        return parameter is None or not parameter.is_meta

    def _start_on(self, device: torch.device | str) -> None:
        """Put fresh running statistics on a device, in place of those that have no values."""
        with torch.inference_mode(False):
            for name, start in _START.items():
                if (buffer := getattr(self, name)) is not None:
                    fresh = torch.full((), start, dtype=buffer.dtype, device=device)
                    setattr(self, name, fresh)

    def _apply(self, fn: Any, recurse: bool = True) -> LayerNorm:
        # The meta device holds no values, and `to_empty` gives none: what leaves it starts fresh.
        on_meta = self._is_on_meta()
        if self._lacks_values():
            self.reset_running_stats()
        super()._apply(fn, recurse)
        if on_meta and not self._is_on_meta():
            self.reset_running_stats()
        return self

    def _is_on_meta(self) -> bool:
        tensors = (next(self.parameters(), None), self._buffers.get("running_mean"))
        return any(t is not None and t.is_meta for t in tensors)

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(accumulator_dtype(x.dtype))
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

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing, unexpected = list[str](), list[str]()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs
        )
        # The statistics are only watched: a checkpoint may lack them, or have them for nobody.
        watched = {prefix + name for name in LAYER_NORM_STATISTICS}
        missing_keys += [key for key in missing if key not in watched]
        unexpected_keys += [key for key in unexpected if key not in watched]
        # With other parameters, what was watched is no longer that of this layer.
        own = {prefix + name for name, value in self._parameters.items() if value is not None}
        replaced = own and own.issubset(state_dict) and watched.isdisjoint(state_dict)
        if replaced or self._lacks_values():
            self.reset_running_stats()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # A tool that sets each parameter by itself, as accelerate does, tells the layer nothing.
        others = chain(self.parameters(), destination.values())
        if self._lacks_values() and any(not getattr(t, "is_meta", True) for t in others):
            self.reset_running_stats()
        super()._save_to_state_dict(destination, prefix, keep_vars)
