"""`recalibrate` and `sync_buffers`: exact running statistics, and equal ones in all processes."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug import _checks
from normplug._ops import parts
from normplug._ops.batch_norm import channel_stats
from normplug._ops.batch_norm_sync import group_to_join
from normplug._statistics.runs import (
    batches,
    gathered,
    is_frozen,
    norms_in_training,
    run,
    running_layers,
    untouched,
)
from normplug._table import Rows, shown
from normplug._torch import InstanceNormBase

_NO_COUNT = 1e-30


class Moments:
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

    def add_rows(self, rows: Tensor) -> None:
        """Merge the vectors in the rows of a matrix."""
        variance, mean = torch.var_mean(rows.double(), 0, correction=0)
        self.add(len(rows), mean, variance * len(rows))

    @property
    def variance(self) -> Tensor:
        """The unbiased variance; nan of fewer than two vectors."""
        return torch.where(self.count > 1, self.m2 / (self.count - 1), torch.nan)


class LayerMoments:
    """The moments of the inputs of one layer with running statistics.

    A BatchNorm's statistics are those of all values of a channel; an InstanceNorm's are averages
    over the samples of each sample's mean and unbiased variance.

    Attributes:
        values: the moments of a BatchNorm's values.
        means, variances: the moments of the mean and unbiased variance of each call of a BatchNorm,
            or of each sample of an InstanceNorm.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        size, device = layer.running_mean.numel(), layer.running_mean.device
        self.values, self.means, self.variances = (Moments(size, device) for _ in range(3))

    def add(self, x: Tensor) -> None:
        """Add the input of one call."""
        x = parts.own_part(x.detach())
        if x.numel() == 0:
            return
        if isinstance(self.layer, InstanceNormBase):
            x = x.unsqueeze(0) if x.dim() == self.layer._get_no_batch_dim() else x
            variances, means = torch.var_mean(x.float().flatten(2), 2)
            self.means.add_rows(means)
            self.variances.add_rows(variances)
            return
        mean, variance = channel_stats(x)
        count = x.numel() // x.shape[1]
        self.values.add(count, mean, variance * count)
        self.means.add_rows(mean[None])
        self.variances.add_rows(variance[None] * (count / max(count - 1, 1)))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the unbiased variance of all inputs."""
        if isinstance(self.layer, InstanceNormBase):
            return self.means.mean, self.variances.mean
        return self.values.mean, self.values.variance

    def all_moments(self) -> tuple[Moments, ...]:
        """The three, in the order in which processes exchange them."""
        return self.values, self.means, self.variances


@dataclass(frozen=True)
class Recalibrated:
    """What `recalibrate` did to one layer.

    Attributes:
        path: its path in the model; "" is the model itself.
        calls: how many calls were measured, in all processes; of an InstanceNorm, how many samples.
            0 if the layer did not run and is unchanged.
        mean, variance: by how many standard errors of the new running mean and variance the old
            ones were off: the root mean square over channels; nan for fewer than two calls.
    """

    path: str
    calls: int
    mean: float
    variance: float


class Recalibration(Rows[Recalibrated]):
    """The layers of a recalibrated model; `print` it for a table."""

    def columns(self) -> dict[str, list[str]]:
        return {
            "layer": [shown(row.path) for row in self],
            "calls": [str(row.calls) for row in self],
            "mean moved by (s.e.)": [f"{row.mean:.3g}" for row in self],
            "variance moved by": [f"{row.variance:.3g}" for row in self],
        }

    def summary(self) -> str:
        return f"{len(self)} layers have the statistics of the data"


def recalibrate(model: nn.Module, loader: Any, steps: int | None = None) -> Recalibration:
    """Set the running statistics of BatchNorms and InstanceNorms to those of a loader's data.

        mean = sum(x) / n        var = sum((x - mean)^2) / (n - 1)

    Here x are all values of a channel that reach the layer, over all batches and all processes.
    Running averages forget old batches and never see the spread between batches; these statistics
    do neither. The batches' moments are merged by Chan's formula in float64.

    The layers normalise by each batch's own statistics meanwhile, as in training, and everything
    else is in evaluation, so dropout is off. Frozen layers keep their statistics. Use it after
    training, after averaging weights (EMA, SWA), or before evaluation on other data.

    Args:
        model: any module, swapped or stock.
        loader: an iterable of batches. Of a tuple or a list, such as input and labels, the first
            element is the model's input; a mapping gives keywords. Batches are moved to the device
            of the model.
        steps: the number of batches to use; None uses all. Some tens are enough.

    Returns:
        A `Recalibration`: print it to see by how many standard errors each layer has moved.

    In several processes, each passes batches of its own, and all get the same statistics. A model
    with SyncBatchNorm needs as many batches in each. Modes and random number generators are
    restored. If a forward fails, the statistics are, too.

    Raises:
        TypeError: `model` is not a module, or `loader` not an iterable of batches.
        ValueError: there is no layer with running statistics that is not frozen, or no batch.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> moved = recalibrate(model, [torch.randn(8, 3, 6, 6) for _ in range(4)])
        >>> [(row.path, row.calls) for row in moved]
        [('1', 4)]
    """
    _checks.module("recalibrate", model)
    if steps is not None:
        _checks.count("recalibrate", "steps", steps)
    layers = {path: m for path, m in running_layers(model).items() if not is_frozen(m)}
    if not layers:
        raise ValueError(
            f"normplug.recalibrate: {type(model).__name__} has no BatchNorm or InstanceNorm with "
            "running statistics that is not frozen."
        )
    moments = {path: LayerMoments(layer) for path, layer in layers.items()}
    count = 0
    with untouched(model), torch.no_grad(), ExitStack() as hooks:
        norms_in_training(model, layers.values())
        for path, layer in layers.items():
            hook = layer.register_forward_pre_hook(partial(_measure, moments[path]))
            hooks.callback(hook.remove)
        for batch in batches("recalibrate", loader, steps):
            run(model, batch)
            count += 1
    if count == 0:
        raise ValueError("normplug.recalibrate: the loader gave no batch.")
    _merge_processes([each for layer in moments.values() for each in layer.all_moments()])
    return Recalibration(tuple(_assign(path, layer) for path, layer in moments.items()))


def _measure(moments: LayerMoments, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    moments.add(inputs[0])


def _assign(path: str, moments: LayerMoments) -> Recalibrated:
    """Write a layer's new statistics; return by how much they differ from the old ones."""
    layer, calls = moments.layer, int(moments.means.count)
    if calls == 0:
        return Recalibrated(path, 0, math.nan, math.nan)
    moved = []
    spreads = moments.means, moments.variances
    buffers = layer.running_mean, layer.running_var
    for buffer, new, spread in zip(buffers, moments.statistics(), spreads, strict=True):
        error = (spread.variance / calls).sqrt()
        distance = (buffer.to(new) - new) / error.clamp(min=torch.finfo(torch.float64).tiny)
        moved.append(distance.square().mean().sqrt().item())
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            buffer.copy_(new)
    return Recalibrated(path, calls, *moved)


def _merge_processes(moments: list[Moments]) -> None:
    """Merge moments over all processes, by one collective; all get the same bits."""
    processes = gathered(torch.cat([torch.cat([m.count[None], m.mean, m.m2]) for m in moments]))
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
    Without SyncBatchNorm the processes of a distributed run have statistics of their own, so that
    they evaluate differently, and a checkpoint has the statistics of rank 0 only. Call it in every
    process before evaluation or before saving. It sends one small collective.
    `num_batches_tracked` becomes the average of all processes.

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
    if group_to_join(None) is None:
        return model
    moments = {layer: _of_running(layer) for layer in running_layers(model).values()}
    if moments:
        _merge_processes(list(moments.values()))
    for layer, merged in moments.items():
        with torch.inference_mode(layer.running_mean.is_inference()), torch.no_grad():
            layer.running_mean.copy_(merged.mean)
            layer.running_var.copy_(merged.m2 / merged.count)
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_((merged.count / dist.get_world_size()).round())
    return model


def _of_running(layer: Any) -> Moments:
    """A layer's running statistics as the moments of as many values as it has counted batches."""
    own = Moments(layer.running_mean.numel(), layer.running_mean.device)
    counter = layer.num_batches_tracked
    # Where no process has counted, all shares are equal.
    count = own.count + _NO_COUNT + (0.0 if counter is None else counter.to(own.count))
    own.add(count, layer.running_mean, layer.running_var.to(own.m2) * count)
    return own
