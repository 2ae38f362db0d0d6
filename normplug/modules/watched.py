"""Running statistics for monitoring only: how they start, are updated, moved and removed."""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from normplug import _checks
from normplug._torch import transforms_active
from normplug.modes import ModeLike
from normplug.modules.base import Options, TargetVarianceNorm

# Each statistic, and its value before the first batch.
_START = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}


class WatchedRows(TargetVarianceNorm):
    """A norm of rows or groups with scalar running statistics that no result depends on.

    So a checkpoint may lack them or have more of them, and statistics without values (on the meta
    device) are initialised as soon as the layer's device is known.

    Args:
        *args: those of the stock class.
        mode: as in `BatchNorm1d`.
        backend: as in `BatchNorm1d`.
        track_running_stats: keep the running statistics; None leaves it to the class.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional`.
        **kwargs: those of the stock class.
    """

    autocast_output: str
    track_running_stats: bool
    momentum: float | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    # The statistics that the class tracks, if it tracks any; `running_var` is among them.
    _watched: ClassVar[tuple[str, ...]] = tuple(_START)
    # Whether it tracks them by default.
    _watches: ClassVar[bool] = True

    _settings = (*TargetVarianceNorm._settings, "autocast_output")
    _shown = ("momentum", "track_running_stats", *TargetVarianceNorm._shown)
    _call_reads = (*TargetVarianceNorm._call_reads, "momentum", "autocast_output")

    def __init__(
        self,
        *args: Any,
        mode: ModeLike = "golden",
        backend: str = "auto",
        track_running_stats: bool | None = None,
        momentum: float | None = 0.1,
        autocast_output: str = "float32",
        **kwargs: Any,
    ) -> None:
        caller = type(self).__name__
        _checks.momentum(caller, momentum, None, updates=False)
        if track_running_stats is None:
            track_running_stats = self._watches
        _checks.flags(caller, track_running_stats=track_running_stats)
        _checks.autocast_output(caller, autocast_output)
        super().__init__(*args, mode=mode, backend=backend, **kwargs)
        self.autocast_output = autocast_output
        self.track_running_stats = track_running_stats
        self.momentum = momentum
        self.register_statistics(kwargs.get("device"))

    def _adopt(self, options: Options) -> None:
        asked = options.track_running_stats
        self.track_running_stats = self._watches if asked is None else asked
        self.momentum = 0.1
        self.register_statistics(options.device)

    def _leave(self) -> None:
        for name in (*_START, "track_running_stats", "momentum"):
            delattr(self, name)

    def stop_watching(self) -> None:
        """Track no running statistics from now on."""
        self.track_running_stats = False
        self.register_statistics()

    def register_statistics(self, device: Any = None) -> None:
        """Give the layer fresh running statistics, or None for each if it tracks none.

        device: their device if the layer has no weight.
        """
        weight: Tensor | None = self.weight  # type: ignore[assignment]
        double = weight is not None and weight.dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        for name in _START:
            fresh = None
            if self.track_running_stats and name in self._watched:
                fresh = _fresh(name, dtype, device if weight is None else weight.device)
            self.register_buffer(name, fresh)

    def reset_parameters(self) -> None:
        """As in the stock class, and reset the running statistics."""
        super().reset_parameters()  # type: ignore[misc]
        if "running_var" in self._buffers:  # the stock constructor calls this before there are any
            self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Set the running statistics to mean 0, variance 1, no batches."""
        if self._lacks_values():
            parameter = next(self.parameters(), None)
            self._start_on("cpu" if parameter is None else parameter.device)
            return
        for name, start in _START.items():
            if (buffer := getattr(self, name)) is not None:
                buffer.fill_(start)

    def _statistics_to_update(
        self, input: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The running statistics, on the input's device; Nones if this forward updates none."""
        statistics = self._statistics() if self.training else (None, None, None)
        var = statistics[1]
        # torch.func transforms refuse writes to captured tensors; the stock layer has none.
        if var is None or transforms_active():
            return None, None, None
        try:
            device = input.device
        except AttributeError:  # not a tensor: the checks reject it later
            return statistics
        parameter = next(self.parameters(), None) if var.device != device else var
        if parameter is var or (parameter is not None and parameter.device != device):
            return statistics  # if the parameters are elsewhere, the checks refuse the call
        if device.type == "meta":  # moving would lose the values
            return None, None, None
        # A layer without weight and bias learns its device only from its input.
        self._move_statistics(device)
        return self._statistics()

    def _move_statistics(self, device: torch.device) -> None:
        if self._lacks_values():
            self._start_on(device)
            return
        with torch.inference_mode(False):
            for name in _START:
                if (buffer := getattr(self, name)) is not None:
                    setattr(self, name, buffer.to(device))

    def _start_on(self, device: torch.device | str) -> None:
        """Replace statistics without values by fresh ones on a device."""
        for name in _START:
            if (buffer := getattr(self, name)) is not None:
                setattr(self, name, _fresh(name, buffer.dtype, device))

    def _lacks_values(self) -> bool:
        """Whether the statistics are still on the meta device, but no parameter is."""
        var = self._buffers.get("running_var")
        if var is None or not var.is_meta:
            return False
        parameter = next(self.parameters(), None)  # reading `weight` might compute it
        return parameter is None or not parameter.is_meta

    def _is_on_meta(self) -> bool:
        tensors = (next(self.parameters(), None), self._buffers.get("running_var"))
        return any(t is not None and t.is_meta for t in tensors)

    def _apply(self, fn: Any, recurse: bool = True) -> WatchedRows:
        # On the meta device nothing has values, and `to_empty` gives statistics arbitrary ones.
        on_meta = self._is_on_meta()
        if self._lacks_values():
            self.reset_running_stats()
        super()._apply(fn, recurse)
        if on_meta and not self._is_on_meta():
            self.reset_running_stats()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        *others, missing_keys, unexpected_keys, errors = args
        missing, unexpected = list[str](), list[str]()
        super()._load_from_state_dict(state_dict, prefix, *others, missing, unexpected, errors)
        # A checkpoint may lack the statistics, or have them where the layer tracks none.
        watched = {prefix + name for name in _START}
        missing_keys += [key for key in missing if key not in watched]
        unexpected_keys += [key for key in unexpected if key not in watched]
        # Statistics collected with other parameters do not describe the loaded layer.
        own = {prefix + name for name, value in self._parameters.items() if value is not None}
        replaced = own and own.issubset(state_dict) and watched.isdisjoint(state_dict)
        if replaced or self._lacks_values():
            self.reset_running_stats()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # The layer is not told if a tool sets its parameters one by one, as accelerate does.
        others = chain(self.parameters(), destination.values())
        if self._lacks_values() and any(not getattr(t, "is_meta", True) for t in others):
            self.reset_running_stats()
        super()._save_to_state_dict(destination, prefix, keep_vars)


def _fresh(name: str, dtype: torch.dtype, device: Any) -> Tensor:
    kind = torch.long if name == "num_batches_tracked" else dtype
    with torch.inference_mode(False):  # training writes to it
        return torch.full((), _START[name], device=device, dtype=kind)
