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
from normplug._ops import subclasses
from normplug._ops.batch_norm import channel_stats
from normplug._ops.exchange import group_to_join
from normplug._swap.fold import write
from normplug._table import Rows, shown
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

    calls: how many were measured, in all processes; of an InstanceNorm, how many samples. 0 if the
        layer did not run and is unchanged.
    mean, variance: by how many standard errors of the new running mean and variance the old ones
        were off: the root mean square over channels; nan for fewer than two calls.
    """

    path: str  # "" is the model itself
    calls: int
    mean: float
    variance: float


class Recalibration(Rows[Recalibrated]):
    """The layers of a recalibrated model; `print` it for a table."""

    row_type = Recalibrated

    def summary(self) -> str:
        moved = "mean and variance have moved by so many standard errors"
        return f"{len(self)} layers have the statistics of the data: {moved}"


def recalibrate(model: nn.Module, loader: Any, steps: int | None = None) -> Recalibration:
    """Set the running statistics of BatchNorms and InstanceNorms to those of a loader's data.

        mean = sum(x) / n        var = sum((x - mean)^2) / (n - 1)

    Here x are all values of a channel that reach the layer, over all batches and all processes. An
    InstanceNorm gets the averages over samples of each sample's mean and unbiased variance. The
    batches' moments are merged by Chan's formula in float64.

    The layers normalise by each batch's own statistics meanwhile, as in training, and everything
    else is in evaluation, so dropout is off. Frozen layers keep their statistics.

    Args:
        model: any module, swapped or stock.
        loader: a DataLoader, another iterable of batches, or a single batch. docs/batches.md says
            how a batch is read, such as (inputs, labels) or a mapping of keywords.
        steps: the number of batches to use; None uses all. Some tens are enough.

    Returns:
        A `Recalibration`: print it to see by how many standard errors each layer has moved.

    In several processes, each passes batches of its own, and all get the same statistics. A model
    with SyncBatchNorm needs as many batches in each. Modes, parameters, all other buffers and
    random number generators are restored. If there is an error, the statistics stay as they were.

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
    measured = {
        path: _Measured(layer)
        for path, layer in runs.running_layers(model).items()
        if not runs.is_frozen(layer)
    }
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
            call = reader.call(
                batch
            )  # it may try some: not below, where they would count
            with ExitStack() as hooks:
                for one in measured.values():
                    hooks.callback(one.layer.register_forward_pre_hook(one.add).remove)
                reader.apply(reader.model, call)
    _merge_processes(
        [moments for one in measured.values() for moments in (one.values, one.calls)]
    )
    _refuse_infinite(measured)
    return Recalibration(tuple(one.assign(path) for path, one in measured.items()))


def _refuse_infinite(measured: dict[str, _Measured]) -> None:
    """Refuse statistics that are not finite: they would spoil every later evaluation.

    All processes have the same statistics by now, so all refuse them.
    """
    bad = []
    for path, one in measured.items():
        count = one.infinite_channels()
        if count > 0:
            bad.append(f"{shown(path)} ({count} of {one.layer.num_features} channels)")
    if bad:
        raise ValueError(
            "normplug.recalibrate: running statistics must be finite; the batches give a mean "
            f"or variance that is not in {', '.join(bad)}. All statistics are as before. Leave "
            "out the batches with inf or nan, or run the model in float32."
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
        size, device = layer.running_mean.numel(), layer.running_mean.device
        self.values, self.calls = _Moments(size, device), _Moments(2 * size, device)

    def add(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Add the input of one call; a hook."""
        x = subclasses.own_part(inputs[0].detach())
        if x.numel() == 0:
            return
        if isinstance(layer, InstanceNormBase):
            x = x.unsqueeze(0) if x.dim() == layer._get_no_batch_dim() else x
            variance, mean = torch.var_mean(x.float().flatten(2), 2)
        else:
            biased, mean = channel_stats(x)[::-1]
            n = x.numel() // x.shape[1]
            self.values.add(n, mean, biased * n)
            variance, mean = biased[None] * (n / max(n - 1, 1)), mean[None]
        rows = torch.cat([mean, variance], 1).double()
        spread, center = torch.var_mean(rows, 0, correction=0)
        self.calls.add(len(rows), center, spread * len(rows))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance of each channel, of all that was measured."""
        if isinstance(self.layer, InstanceNormBase):
            mean, variance = self.calls.mean.chunk(2)
            return mean, variance
        return self.values.mean, self.values.variance

    def infinite_channels(self) -> int:
        """How many channels have statistics that are not finite in the dtype of their buffers."""
        if self.calls.count == 0:
            return 0
        mean, variance = self.statistics()
        finite = mean.to(self.layer.running_mean.dtype).isfinite()
        finite &= variance.to(self.layer.running_var.dtype).isfinite()
        return int((~finite).sum())

    def assign(self, path: str) -> Recalibrated:
        """Write the layer's new statistics; return by how much they differ from the old ones."""
        calls = int(self.calls.count)
        if calls == 0:
            return Recalibrated(path, 0, math.nan, math.nan)
        buffers = self.layer.running_mean, self.layer.running_var
        new = self.statistics()
        errors = (self.calls.variance / calls).sqrt().chunk(2)
        moved = []
        for buffer, value, error in zip(buffers, new, errors, strict=True):
            distance = (buffer.to(value) - value) / error.clamp(min=_NO_COUNT)
            moved.append(distance.square().mean().sqrt().item())
            write(buffer, value)
        return Recalibrated(path, calls, *moved)


def _merge_processes(moments: list[_Moments]) -> None:
    """Merge moments over all processes, by one collective; all get the same bits."""
    processes = runs.gathered(
        torch.cat([torch.cat([m.count[None], m.mean, m.m2]) for m in moments])
    )
    sizes = [1 + 2 * m.mean.numel() for m in moments]
    for m in moments:
        m.count, m.mean, m.m2 = (torch.zeros_like(t) for t in (m.count, m.mean, m.m2))
    for process in processes:
        for m, packed in zip(moments, process.split(sizes), strict=True):
            m.add(packed[0], *packed[1:].chunk(2))


def sync_buffers(model: nn.Module) -> nn.Module:
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

    Examples:
        >>> model = sync_buffers(nn.BatchNorm2d(4))
    """
    _checks.module("sync_buffers", model)
    layers = [m for m in runs.running_layers(model).values() if not runs.is_frozen(m)]
    if not layers or group_to_join(None) is None:
        return model
    moments = []
    for layer in layers:  # as the moments of as many values as it has counted batches
        own = _Moments(layer.running_mean.numel(), layer.running_mean.device)
        counter = layer.num_batches_tracked
        # Where no process has counted, all shares are equal.
        count = (
            own.count + _NO_COUNT + (0.0 if counter is None else counter.to(own.count))
        )
        own.add(count, layer.running_mean, layer.running_var.to(own.m2) * count)
        moments.append(own)
    _merge_processes(moments)
    for layer, merged in zip(layers, moments, strict=True):
        write(layer.running_mean, merged.mean)
        write(layer.running_var, merged.m2 / merged.count)
        if layer.num_batches_tracked is not None:
            write(
                layer.num_batches_tracked, (merged.count / dist.get_world_size()).round()
            )
    return model
