"""Statistics that are only watched: how they start, are updated, moved and removed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from normplug import _checks
from normplug._choices import AutocastOutput, Backend
from normplug._ops.subclasses import is_sharded
from normplug._torch import transforms_active
from normplug.modes import ModeLike
from normplug.modules.base import TargetVarianceNorm
from normplug.reference import accumulator_dtype

# Each statistic, and its value before the first batch.
_START = {"watched_mean": 0, "watched_var": 1, "watched_count": 0}
# Their names in the checkpoints of version 0.2.
_EARLIER = ("running_mean", "running_var", "num_batches_tracked")
# torch 2.9 and 2.10 do not compile a module that writes to a buffer which is a DTensor.
_REFUSES_DTENSORS = torch.__version__.startswith(("2.9.", "2.10."))


class WatchedRows(TargetVarianceNorm):
    """A norm of rows or groups with scalar statistics of its input that no result depends on.

    They are buffers that a state_dict leaves out. A buffer is None until the layer has left the
    meta device, and missing if it is not watched. It takes the arguments of `LayerNorm`.
    """

    # The statistics that the class watches, if it watches any; `watched_var` is among them.
    _watched: ClassVar[tuple[str, ...]] = tuple(_START)
    # Whether it watches them by default.
    _watches: ClassVar[bool] = True

    _call_reads = (*_START, "training", "_normplug")

    def __init__(
        self,
        *args: Any,
        mode: ModeLike = "standard",
        backend: Backend = "auto",
        track_running_stats: bool | None = None,
        momentum: float | None = 0.1,
        autocast_output: AutocastOutput = "float32",
        **kwargs: Any,
    ) -> None:
        caller, momentum = type(self).__name__, _checks.as_number(momentum)
        _checks.momentum(caller, momentum, None, updates=False)
        if track_running_stats is not None:
            _checks.flags(caller, track_running_stats=track_running_stats)
        super().__init__(*args, mode=mode, backend=backend, **kwargs)
        self.autocast_output = autocast_output
        self._set(momentum=momentum, watches=bool(track_running_stats))
        self._adopt(self, track_running_stats, kwargs.get("device"))

    @classmethod
    def _adopt(
        cls, module: nn.Module, track_running_stats: bool | None, device: Any
    ) -> None:
        if not (cls._watches if track_running_stats is None else track_running_stats):
            return
        weight: Tensor | None = getattr(module, cls._affine_names[0])
        for name in cls._watched:
            fresh = _fresh(name, weight, device if weight is None else weight.device)
            module.register_buffer(
                name, None if fresh.is_meta else fresh, persistent=False
            )

    @classmethod
    def _leave(cls, module: nn.Module) -> None:
        for name in cls._watched:
            if name in module._buffers:
                delattr(module, name)

    def reset_parameters(self) -> None:
        """Reset weight and bias, and the watched statistics."""
        stock: Any = super()
        if hasattr(stock, "reset_parameters"):  # a class of another library may have none
            stock.reset_parameters()
        self.reset_watched()

    def reset_watched(self) -> None:
        """Set the watched statistics to mean 0, variance 1, no batches."""
        for name in self._watched:
            if (buffer := self._buffers.get(name)) is not None:
                buffer.fill_(_START[name])

    def _statistics_to_update(
        self, input: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The statistics, on the input's device; Nones if this forward updates none."""
        own = self._buffers
        # torch.func transforms refuse writes to captured tensors; the stock layer has none.
        if not self.training or "watched_var" not in own or transforms_active():
            return None, None, None
        asked = isinstance(input, Tensor) and self._asks_for_kernels(input)
        # Where a compiler or PyTorch's kernels run, averages over all rows cost more than the norm.
        if not self._normplug.watches and (is_compiling() or not asked):
            return None, None, None
        var = own["watched_var"]
        device = input.device if isinstance(input, Tensor) else None
        if device is not None and (var is None or var.device != device):
            weight = self._parameters.get(self._affine_names[0])
            if device.type == "meta" or not (weight is None or weight.device == device):
                # There is nothing to measure, or the checks will reject the call.
                return None, None, None
            self._move_watched(device)
        if _REFUSES_DTENSORS and is_compiling() and is_sharded(own["watched_var"]):
            return None, None, None
        return own.get("watched_mean"), own["watched_var"], own["watched_count"]

    def _move_watched(self, device: torch.device) -> None:
        """Move the statistics to a device; they start there if they have no values."""
        weight = self._parameters.get(self._affine_names[0])
        with torch.inference_mode(False):
            for name in self._watched:
                t = self._buffers[name]
                if t is None or t.is_meta:
                    t = _fresh(name, weight, device)
                self._buffers[name] = t.to(device)

    def _apply(self, fn: Any, recurse: bool = True) -> WatchedRows:
        # On the meta device nothing has values, and `to_empty` would give arbitrary ones.
        for name in self._watched:
            if (t := self._buffers.get(name)) is not None and t.is_meta:
                self._buffers[name] = None
        super()._apply(fn, recurse)
        return self

    def _shown(self) -> list[str]:
        # None: where kernels run.
        watches = "watched_var" in self._buffers and (self._normplug.watches or None)
        momentum = f"momentum={self._normplug.momentum}"
        return [momentum, f"track_running_stats={watches}", *super()._shown()]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **named: Any
    ) -> None:
        # Checkpoints of version 0.2 have them.
        earlier = [prefix + name for name in _EARLIER]
        own = {key: value for key, value in state_dict.items() if key not in earlier}
        super()._load_from_state_dict(own, prefix, *args, **named)


def _fresh(name: str, weight: Tensor | None, device: Any) -> Tensor:
    dtype = accumulator_dtype(None if weight is None else weight.dtype)
    dtype = torch.long if name == "watched_count" else dtype
    with torch.inference_mode(False):  # training writes to it
        return torch.full((), _START[name], device=device, dtype=dtype)
