"""`recalibrate` and `sync_buffers`: exact running statistics, and equal ones in all processes."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug import _checks
from normplug._batches import Reader
from normplug._choices import Model
from normplug._ops import subclasses
from normplug._ops.batch_norm import channel_stats
from normplug._ops.exchange import group_to_join
from normplug._swap.fold import write
from normplug._table import Table, shown
from normplug._tools import runs
from normplug._torch import InstanceNormBase

_NO_COUNT = 1e-30


class _Moments:
    """Count, mean and M2 (the sum of squared distances from the mean) of vectors, in float64.

    Source of the merge: Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
    """

    def __init__(self, size: int, device: Any) -> None:
        device = "cpu" if device.type == "mps" else device  # which has no float64
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.m2 = torch.zeros_like(self.mean)

    def add(self, count: Any, mean: Tensor, m2: Tensor) -> None:
        """Merge the moments of other values."""
        total = self.count + count
        share = count / total.clamp(min=_NO_COUNT)
        difference = mean.to(self.mean) - self.mean
        self.mean += difference * share
        self.m2 += m2.to(self.mean) + difference.square() * self.count * share
        self.count = total

    @property
    def variance(self) -> Tensor:
        """The unbiased variance; nan of fewer than two vectors."""
        return torch.where(self.count > 1, self.m2 / (self.count - 1), torch.nan)


class Recalibrated(NamedTuple):
    """What `recalibrate` did to one layer.

    calls: how many calls were measured, in all processes; for an InstanceNorm, how many samples. 0
        if the layer did not run and is unchanged.
    mean, variance: how far the running mean and variance have moved, in standard errors of the new
        values: the root mean square over channels; nan for fewer than two calls.
    """

    path: str  # "" is the model itself
    calls: int
    mean: float
    variance: float


class Recalibration(Table[Recalibrated]):
    """The layers of a recalibrated model; `print` it for a table."""

    row_type = Recalibrated

    def summary(self) -> str:
        layers = "layer" if len(self) == 1 else "layers"
        return f"{len(self)} {layers} recalibrated. mean, variance: the shift, in standard errors"


def recalibrate(model: nn.Module, loader: Any, steps: int | None = None) -> Recalibration:
    """Set the running statistics of BatchNorms and InstanceNorms to those of a loader's data.

        mean = sum(x) / n        var = sum((x - mean)^2) / (n - 1)

    Here x are all values of a channel that reach the layer, over all batches and all processes. An
    InstanceNorm gets the averages over samples of each sample's mean and unbiased variance. The
    batches' moments are merged by Chan's formula in float64.

    Meanwhile the layers normalise by each batch's own statistics, as in training. Everything else
    is in evaluation, so dropout is off. Frozen layers keep their statistics.

    Args:
        model: any module, swapped or stock.
        loader: a DataLoader, another iterable of batches, or a single batch. docs/doctor.md says
            how a batch is read, such as (inputs, labels) or a mapping of keywords.
        steps: the number of batches to use; None uses all. Some tens are enough.

    Returns:
        A `Recalibration`: print it to see by how many standard errors each layer has moved.

    In several processes, each passes batches of its own, and all get the same statistics. A model
    with SyncBatchNorm needs the same number of batches in each. Modes, parameters, all other
    buffers and random number generators are restored. After an error, the statistics are unchanged.

    Raises:
        TypeError: `model` is not a module, or `loader` neither an iterable nor a batch.
        RuntimeError: the model does not take a batch.
        ValueError: there is no layer with running statistics that is not frozen, or no batch; or
            the new mean or variance of a channel is not finite in the dtype of its buffer.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> moved = recalibrate(model, [torch.randn(8, 3, 6, 6) for _ in range(4)])
        >>> [(row.path, row.calls) for row in moved]
        [('1', 4)]
    """
    _checks.module("recalibrate", model)
    if steps is not None:
        _checks.count("recalibrate", "steps", steps)
    measured = {path: _Measured(layer) for path, layer in _unfrozen(model).items()}
    if not measured:
        raise ValueError(
            f"normplug.recalibrate: {type(model).__name__} has no BatchNorm or InstanceNorm with "
            "running statistics that is not frozen."
        )
    reader = Reader("recalibrate", model)
    with runs.untouched(model), torch.no_grad():
        for module in model.modules():
            module.training = False
        for one in measured.values():
            one.layer.training = True
        for batch in reader.batches(loader, steps):
            # Not below: it may try some calls, which would count.
            call = reader.call(batch)
            with ExitStack() as hooks:
                for one in measured.values():
                    hooks.callback(one.layer.register_forward_pre_hook(one.add).remove)
                reader.apply(reader.model, call)
    layers = list(measured.values())
    _merge_processes([one.values for one in layers] + [one.calls for one in layers])
    statistics = {p: one.statistics() for p, one in measured.items() if one.calls.count}
    _refuse_infinite(
        "recalibrate",
        model,
        statistics,
        "the batches give a mean or variance that is not",
        "Leave out the batches with inf or nan, or run the model in float32.",
    )
    return Recalibration(tuple(one.assign(path) for path, one in measured.items()))


def _unfrozen(model: nn.Module) -> dict[str, Any]:
    """Path -> layer of each layer with running statistics that is not frozen."""
    layers = runs.running_layers(model)
    return {path: layer for path, layer in layers.items() if not runs.is_frozen(layer)}


def _refuse_infinite(
    caller: str,
    model: nn.Module,
    statistics: dict[str, tuple[Tensor, Tensor]],
    cause: str,
    way_out: str,
) -> None:
    """Refuse new statistics that are not finite in the dtype of a layer's buffers.

    They would spoil every later evaluation. All processes have the same ones by now, so all refuse.

    statistics: path -> mean and variance.
    """
    bad = []
    for path, (mean, variance) in statistics.items():
        layer: Any = model.get_submodule(path)
        finite = mean.to(layer.running_mean.dtype).isfinite()
        finite &= variance.to(layer.running_var.dtype).isfinite()
        count = int((~finite).sum())
        if count > 0:
            bad.append(f"{shown(path)} ({count} of {len(finite)} channels)")
    if bad:
        raise ValueError(
            f"normplug.{caller}: running statistics must be finite; {cause} in "
            f"{', '.join(bad)}. All statistics are unchanged. {way_out}"
        )


class _Measured:
    """A layer with running statistics, and the moments of its inputs.

    Attributes:
        values: the moments of all values of a channel; empty for an InstanceNorm.
        calls: the moments of the mean and unbiased variance of each call, or of each sample of an
            InstanceNorm, as one vector.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        size = layer.running_mean.numel()
        self.values = _Moments(size, layer.running_mean.device)
        self.calls = _Moments(2 * size, layer.running_mean.device)

    def add(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Add the input of one call; a hook."""
        x = subclasses.own_part(inputs[0].detach())
        if x.numel() == 0:
            return
        if isinstance(layer, InstanceNormBase):
            x = x.unsqueeze(0) if x.dim() == layer._get_no_batch_dim() else x
            variances, means = torch.var_mean(x.float().flatten(2), 2)
        else:
            mean, biased = channel_stats(x)
            count = x.numel() // x.shape[1]
            self.values.add(count, mean, biased * count)
            means = mean[None]
            variances = biased[None] * (count / max(count - 1, 1))
        rows = torch.cat([means, variances], 1).double()
        spread, center = torch.var_mean(rows, 0, correction=0)
        self.calls.add(len(rows), center, spread * len(rows))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance of each channel, of all that was measured."""
        if isinstance(self.layer, InstanceNormBase):
            mean, variance = self.calls.mean.chunk(2)
            return mean, variance
        return self.values.mean, self.values.variance

    def assign(self, path: str) -> Recalibrated:
        """Write the layer's new statistics; return by how much they differ from the old ones."""
        calls = int(self.calls.count)
        if calls == 0:
            return Recalibrated(path, 0, math.nan, math.nan)
        buffers = self.layer.running_mean, self.layer.running_var
        errors = (self.calls.variance / calls).sqrt().chunk(2)
        moved = []
        for buffer, value, error in zip(buffers, self.statistics(), errors, strict=True):
            distance = (buffer.to(value) - value) / error.clamp(min=_NO_COUNT)
            moved.append(distance.square().mean().sqrt().item())
            write(buffer, value)
        return Recalibrated(path, calls, *moved)


def _merge_processes(moments: list[_Moments]) -> None:
    """Merge moments over all processes, by one collective; all get the same bits."""
    vectors = [torch.cat([m.count[None], m.mean, m.m2]) for m in moments]
    processes = runs.gathered(torch.cat(vectors))
    for m in moments:
        m.count, m.mean, m.m2 = (torch.zeros_like(t) for t in (m.count, m.mean, m.m2))
    for process in processes:
        parts = process.split([len(vector) for vector in vectors])
        for m, part in zip(moments, parts, strict=True):
            m.add(part[0], *part[1:].chunk(2))


def sync_buffers(model: Model) -> Model:
    """Merge the running statistics of all processes, by their counts of batches.

        mean = sum_r w_r * mean_r        var = sum_r w_r * (var_r + (mean_r - mean)^2)

    w_r is process r's share of all `num_batches_tracked`; without counts, all shares are equal.
    Call it in every process before evaluation or before saving, unless the model has SyncBatchNorm.
    Frozen layers keep their statistics.
    It sends one small collective. `num_batches_tracked` becomes the average of all processes.

    Args:
        model: any module, swapped or stock, the same in every process.

    Returns:
        `model` itself; unchanged in a single process.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the merged mean or variance of a channel is not finite in the dtype of its
            buffer, in every process. The statistics are unchanged.

    Examples:
        >>> model = sync_buffers(nn.BatchNorm2d(4))
    """
    _checks.module("sync_buffers", model)
    layers = _unfrozen(model)
    if not layers or group_to_join(None) is None:
        return model
    merged = {path: _as_counted(layer) for path, layer in layers.items()}
    _merge_processes(list(merged.values()))
    _refuse_infinite(
        "sync_buffers",
        model,
        {path: (m.mean, m.m2 / m.count) for path, m in merged.items()},
        "the merged mean or variance is not",
        "Call normplug.recalibrate(model, loader) in every process, to measure them again.",
    )
    for path, layer in layers.items():
        moments = merged[path]
        write(layer.running_mean, moments.mean)
        write(layer.running_var, moments.m2 / moments.count)
        if layer.num_batches_tracked is not None:
            count = (moments.count / dist.get_world_size()).round()
            write(layer.num_batches_tracked, count)
    return model


def _as_counted(layer: Any) -> _Moments:
    """A layer's statistics as the moments of as many values as it has counted batches."""
    moments = _Moments(layer.running_mean.numel(), layer.running_mean.device)
    # If no process has counted, all shares are equal.
    count = moments.count + _NO_COUNT
    if layer.num_batches_tracked is not None:
        count += layer.num_batches_tracked.to(count)
    moments.add(count, layer.running_mean, layer.running_var.to(moments.m2) * count)
    return moments
