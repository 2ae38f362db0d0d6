"""`doctor`: what is wrong with a model's norms, with evidence, and how to fix it.

An `Examination` measures; the rules then judge what it has seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normplug import _checks, _convert
from normplug._batches import Reader, runnable
from normplug._ops.exchange import group_to_join
from normplug._restore import duplicate
from normplug._table import Table
from normplug._tools import groups, runs
from normplug._tools.examination import (
    LINEAR,
    OF_ROWS,
    Examination,
    Seen,
    is_batch_norm,
)
from normplug._tools.trials import Trials
from normplug._torch import BatchNormBase, InstanceNormBase

_HALF = (torch.float16, torch.bfloat16)

# Thresholds. Healthy models stay within all of them, when initialised and after some training.
_FEW = 16  # values of a channel
_DEAD = 1e-9  # variance of a channel, in units of eps
_DOMINATED = 0.1  # median variance, in units of eps
_FAR = 64  # mean, in standard deviations
_START = 0.25  # share of the initial value in running statistics
_OFF_MEAN = 1.0  # in standard deviations
_OFF_LOG_VARIANCE = math.log(2)
_ERRORS = 4  # standard errors beyond that
_LAST = 0.9  # momentum: the share of the last batch
_GROWTH_A_BLOCK = 1.5  # of the variance
_GROWTH = 300  # in all blocks

_DEPTH = 'normplug.swap(model, normplug.by_depth("1/l"))'
_BIAS = "a bias before a BatchNorm, which has no effect"
_GROWS = "residual variance that grows with depth"
_IDENTITY = "a norm without effect"

# Finding -> its fix for the layer at {path}; {0} is a value that the rule yields. Code can be run
# unchanged. {recalibrate} of a frozen layer thaws it first, and freezes it again.
_FIXES = {
    "poisoned running statistics": "{recalibrate}; {safe}",
    "running statistics at their initial values": "{recalibrate}",
    "running statistics stale, or of other data": "{recalibrate}",
    "running statistics that are missing": "{layer}.track_running_stats = False  # if intended",
    "a gap between training and evaluation": "move dropout after the norm, or freeze the norm",
    "a momentum too small for the steps trained": (
        "{recalibrate}  # or train as long again with {layer}.momentum = {0:.2g}"
    ),
    "a momentum that keeps only the last batch": "{layer}.momentum = 0.1; {recalibrate}",
    "statistics that differ between ranks": "normplug.sync_buffers(model)",
    "statistics in half precision": "{layer}.float()",
    "a frozen weight, and statistics that move": 'normplug.freeze(model, include="{path}")',
    "a norm in evaluation, whose weight trains": (
        "{layer}.train()  # or normplug.freeze({layer}, affine=False), if intended"
    ),
    "too few values per channel": (
        "a larger batch, GroupNorm, or normplug.swap(model, sync=True) in several processes"
    ),
    "dead channels": "remove these channels, or reinitialise their weights",
    "eps dominates the variance": "{layer}.{0} = {1:.1g}",
    _BIAS: "{0}(..., bias=False)",
    _IDENTITY: "replace {path} by nn.Identity()",
    "norm parameters that decay": (
        "optimizer = {1}(normplug.param_groups(model, {0:g}), ...)"
    ),
    "a BatchNorm under activation checkpointing": "{safe}",
    "a BatchNorm that is called on different inputs": "a layer for each call",
    _GROWS: "{0}",
    "cancellation: a mean far above the deviation": "subtract the mean, and then cast to half",
    "LayerNorm over the wrong axis": "x.permute(0, 2, 3, 1) before {path}, and back after it",
    "one value per group: the output is the bias": "fewer groups: nn.GroupNorm(1, {0})",
}


class Finding(NamedTuple):
    """One finding of `doctor`."""

    layer: str  # its path; "" is the model itself
    finding: str
    evidence: str  # in figures
    fix: str  # a line of code, or what to change


class Diagnosis(Table[Finding]):
    """The findings of `doctor`; `print` it for a table."""

    row_type = Finding

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings; () for a healthy model."""
        return self.rows

    def summary(self) -> str:
        return f"findings: {len(self)}"

    def __str__(self) -> str:
        return super().__str__() if self.rows else "no findings"


class _Claim(NamedTuple):
    """What a rule says of a layer."""

    path: str
    finding: str
    evidence: str
    values: tuple[Any, ...] = ()  # that the fix names


class _Distance(NamedTuple):
    """How far a mean is, in standard deviations, and a log variance: root mean squares."""

    mean: float
    log_variance: float

    def __str__(self) -> str:
        factor = math.exp(min(self.log_variance, 99))
        off = f"the mean is off by {self.mean:.2g} deviations"
        return f"{off}, the variance by a factor of {factor:.3g}"

    def is_far(self, samples: float = math.inf) -> bool:
        """Whether it is more than healthy training and sampling explain.

        Training moves weights, so small differences are healthy. A sample is one observation, as
        its values depend on each other.
        """
        error = _ERRORS * samples**-0.5
        if self.mean > _OFF_MEAN + error:
            return True
        return self.log_variance > _OFF_LOG_VARIANCE + math.sqrt(2) * error


def _distance(mean: Tensor, var: Tensor, to_mean: Tensor, to_var: Tensor) -> _Distance:
    scale = to_var.clamp(min=1e-30)
    off = (mean - to_mean) / scale.sqrt()
    ratio = (var.clamp(min=1e-30) / scale).log()
    squares = torch.stack([off.square().mean(), ratio.square().mean()])
    return _Distance(*squares.sqrt().tolist())


def _is_at_start(layer: Any) -> bool:
    """Whether running statistics are mean 0 and variance 1, as before the first batch.

    The count of batches does not tell: checkpoints and `recalibrate` leave it behind.
    """
    mean, var = layer.running_mean, layer.running_var
    return not mean.any() and bool((var == 1).all())


def _is_identity(layer: Any) -> bool:
    """Whether weight and bias are 1 and 0, or missing."""
    has_weight = layer.weight is not None and bool((layer.weight != 1).any())
    has_bias = layer.bias is not None and bool(layer.bias.any())
    return not (has_weight or has_bias)


def _share_of_start(layer: Any) -> float:
    """The share that the start has in a moving average, by the count of batches."""
    if layer.momentum is None or layer.num_batches_tracked is None:
        return 0.0
    return (1 - layer.momentum) ** int(layer.num_batches_tracked)


_Claims = Iterator[_Claim]


def _of_statistics(seen: Seen, started: int) -> _Claims:
    layer = seen.layer
    path = seen.path
    values = torch.stack([layer.running_mean.float(), layer.running_var.float()])
    bad = int((~values.isfinite()).any(0).sum())
    if bad:
        text = f"{bad} of {len(values[0])} channels have nan or inf"
        yield _Claim(path, "poisoned running statistics", text)
    if layer.running_var.dtype in _HALF:
        text = f"they are {layer.running_var.dtype}"
        yield _Claim(path, "statistics in half precision", text)
    if _is_at_start(layer) and seen.trains and started:
        text = f"mean 0, variance 1, and {started} other layers have statistics"
        yield _Claim(path, "running statistics at their initial values", text)
    if _is_at_start(layer) and seen.calls and not seen.trains and _is_identity(layer):
        text = "mean 0, variance 1, and the layer is in evaluation"
        yield _Claim(path, "running statistics at their initial values", text)
    if seen.trains:
        yield from _of_momentum(seen)
    first, *others = runs.gathered(values)
    off = max(((other - first).abs().max().item() for other in others), default=0.0)
    if off > 0:
        text = f"by up to {off:.3g} over {1 + len(others)} processes"
        yield _Claim(path, "statistics that differ between ranks", text)


def _of_momentum(seen: Seen) -> _Claims:
    layer = seen.layer
    if layer.momentum is not None and layer.momentum >= _LAST:
        text = f"momentum={layer.momentum:g}, where PyTorch's default is 0.1"
        yield _Claim(seen.path, "a momentum that keeps only the last batch", text)
    rest = _share_of_start(layer)
    if _START < rest < 1 and seen.trained and not _is_at_start(layer):
        data, mixed = _distances(seen)
        # Statistics that are as far from the mixture as from the data come from elsewhere.
        if not mixed.is_far() and 2 * math.hypot(*mixed) < math.hypot(*data):
            steps = int(layer.num_batches_tracked)
            share = f"the initial value has a share of {rest:.0%}"
            text = f"after {steps} batches, {share} in the statistics"
            finding = "a momentum too small for the steps trained"
            yield _Claim(seen.path, finding, text, (min(0.5, 3 / steps),))


def _of_modes(seen: Seen, model: nn.Module) -> _Claims:
    layer = seen.layer
    parameters = list(layer.parameters(recurse=False))
    trains = any(p.requires_grad for p in parameters)
    if parameters and layer.training and not trains:
        text = "requires_grad is False, training is True"
        yield _Claim(seen.path, "a frozen weight, and statistics that move", text)
    if trains and model.training and not layer.training and not runs.is_frozen(layer):
        text = "requires_grad is True, but training is False, in a model in training"
        yield _Claim(seen.path, "a norm in evaluation, whose weight trains", text)
    if seen.trains and seen.repeats and getattr(layer, "statistics", "torch") != "safe":
        text = f"{seen.repeats} call(s) in the backward: each batch counts more than once"
        yield _Claim(seen.path, "a BatchNorm under activation checkpointing", text)
    if seen.trains and seen.calls > 1 and len(seen.trained) >= seen.calls:
        yield from _of_calls(seen)


def _of_calls(seen: Seen) -> _Claims:
    """Calls in one forward whose inputs differ: no running statistics describe both."""
    first, *others = seen.trained[: seen.calls]
    for other in others:
        distance = _distance(other.mean, other.var, first.mean, first.var)
        if distance.is_far(min(first.samples, other.samples)):
            text = f"{seen.calls} calls in one forward; between two of them, {distance}"
            finding = "a BatchNorm that is called on different inputs"
            yield _Claim(seen.path, finding, text)
            return


def _of_input(seen: Seen) -> _Claims:
    layer = seen.layer
    path = seen.path
    mean, var, count, _ = seen.trained[0]
    if is_batch_norm(layer):
        joins = hasattr(layer, "process_group") and group_to_join(None) is not None
        if count < _FEW and seen.trains and not joins:
            text = f"{count} for input of shape {seen.shape}"
            yield _Claim(path, "too few values per channel", text)
    eps_name = getattr(_convert.declared(layer), "_eps_name", "eps")
    # None: the eps of an RMSNorm depends on the dtype.
    eps = getattr(layer, "_eps", getattr(layer, eps_name, None)) or 0.0
    dead = int((var <= _DEAD * eps).sum())
    median = var.median().item()
    if is_batch_norm(layer) and dead and count > 1:
        yield _Claim(
            path, "dead channels", f"{dead} of {len(var)} channels have variance 0"
        )
    # A median of 0 is no fault: queries, for example, may start at 0.
    elif 0 < median < _DOMINATED * eps and count > 1:
        text = f"the median variance is {median:.2g}, and eps={eps:g}"
        yield _Claim(path, "eps dominates the variance", text, (eps_name, median / 100))
    far = float((mean.abs() > _FAR * var.sqrt()).float().mean())
    if seen.dtype in _HALF and far > 0.01 and dead == 0:
        ratio = (mean.abs() / var.sqrt()).max()
        text = f"|mean| is up to {ratio:.3g} standard deviations in {seen.dtype}"
        yield _Claim(path, "cancellation: a mean far above the deviation", text)
    if isinstance(layer, nn.GroupNorm) and count == 1:
        text = f"input of shape {seen.shape} in {layer.num_groups} groups"
        finding = "one value per group: the output is the bias"
        yield _Claim(path, finding, text, (layer.num_channels,))


def _of_decay(seen: Seen, decays: dict[int, float], kind: str) -> _Claims:
    norms = groups.norm_parameters(seen.layer)
    decay = max((decays.get(id(p), 0) for p in norms), default=0)
    if decay:
        text = f"weight_decay={decay:g}"
        yield _Claim(seen.path, "norm parameters that decay", text, (decay, kind))


def _of_missing_statistics(seen: Seen) -> _Claims:
    layer = seen.layer
    if not isinstance(layer, (BatchNormBase, InstanceNormBase)):
        return
    if layer.track_running_stats and layer.running_mean is None:
        text = f"track_running_stats=True, and the {layer.num_features} channels have no mean"
        yield _Claim(seen.path, "running statistics that are missing", text)


def _of_neighbours(examination: Examination) -> _Claims:
    """Faults of what comes before a norm. `_tried` tests the claims of an effect."""
    for before, path in examination.pairs:
        norm = examination.seen[path].layer
        shape = examination.seen[path].shape
        layer = before.layer
        if isinstance(layer, LINEAR):
            of_rows = _convert.plain_class(norm) in OF_ROWS
            if of_rows and len(shape) == 4 and not isinstance(layer, nn.Linear):
                text = f"it normalises the width of input (N, C, H, W) = {shape}"
                yield _Claim(path, "LayerNorm over the wrong axis", text)
            bias = layer.bias
            if (
                not before.is_read
                and is_batch_norm(norm)
                and bias is not None
                and bias.any()
            ):
                norm_does = f"BatchNorm {path} subtracts the mean"
                text = f"{norm_does}; the bias has {bias.numel()} parameters"
                yield _Claim(before.path, _BIAS, text, (type(layer).__name__, path))
        elif not before.is_read and layer is not norm:
            text = f"{path} normalises its output directly"
            yield _Claim(before.path, _IDENTITY, text, (path,))


def _tried(claims: Iterable[_Claim], trials: Trials | None) -> _Claims:
    """The claims of an effect that hold on a copy of the model, and all other claims.

    Without a copy, no claim of an effect holds.
    """
    for claim in claims:
        holds = claim.finding not in (_BIAS, _IDENTITY)
        if trials is not None and claim.finding == _BIAS:
            holds = trials.is_bias_without_effect(claim.path, claim.values[-1])
        if trials is not None and claim.finding == _IDENTITY:
            holds = trials.is_norm_without_effect(claim.path, claim.values[-1])
        if holds:
            yield claim


def _of_growth(examination: Examination) -> _Claims:
    """Variances of like norms in numbered blocks of one width."""
    series: dict[tuple[Any, ...], list[tuple[str, float]]] = {}
    for path, seen in examination.seen.items():
        numbered = re.match(r"(.*?)\.?\b\d+\.(.+)$", path)
        if numbered and seen.trained:
            weight = seen.layer.weight
            like = (*numbered.groups(), None if weight is None else weight.shape)
            variance = seen.trained[0].var.mean().item()
            series.setdefault(like, []).append((path, variance))
    for blocks in series.values():
        first = blocks[0][1]
        path, last = blocks[-1]
        if len(blocks) < 4 or not 0 < _GROWTH * first < last < math.inf:
            continue
        rate = (last / first) ** (1 / (len(blocks) - 1))
        if rate > _GROWTH_A_BLOCK:
            text = f"from {first:.3g} to {last:.3g} over {len(blocks)} blocks: {rate:.2f} each"
            yield _Claim(path, _GROWS, text)


def _fix_of_growth(trials: Trials | None, batch: Any) -> str:
    """`by_depth`, if it ends the growth in a copy of the model."""
    model = None if trials is None else trials.swapped_by_depth()
    if model is not None:
        examination = Examination(model, Reader("doctor", model))
        examination.run([batch], None)
        if not list(_of_growth(examination)):
            return _DEPTH
    return "smaller weights at the end of each block, or a smaller factor on the residual stream"


def _of_evaluation(examination: Examination) -> _Claims:
    """Statistics that do not describe the data, and the first input that evaluation changes."""
    changed = False
    for path, seen in examination.seen.items():
        if not (is_batch_norm(seen.layer) and seen.trained):
            continue
        if seen.evaluated is not None and seen.trains and not changed:
            trained = seen.trained[0]
            evaluated = seen.evaluated
            gap = _distance(evaluated.mean, evaluated.var, trained.mean, trained.var)
            changed = gap.is_far()
            if changed:
                text = f"the same batch in evaluation: {gap}"
                yield _Claim(path, "a gap between training and evaluation", text)
        if seen.layer.running_mean is not None and not _is_at_start(seen.layer):
            # The distance from the data, or from their mixture with the initial values.
            data, mixed = _distances(seen)
            nearest = _Distance(*map(min, data, mixed))
            samples = sum(call.samples for call in seen.trained)
            # Another rule finds inf and nan.
            if math.isfinite(sum(nearest)) and nearest.is_far(samples):
                text = f"{nearest}, in {samples} samples"
                yield _Claim(path, "running statistics stale, or of other data", text)


def _distances(seen: Seen) -> tuple[_Distance, _Distance]:
    """How far running statistics are from the data's, and from a mixture with initial values."""
    layer = seen.layer
    mean = torch.stack([call.mean for call in seen.trained]).mean(0)
    var = torch.stack([call.var for call in seen.trained]).mean(0)
    start = _share_of_start(layer)
    running = layer.running_mean.to(mean), layer.running_var.to(var)
    mixed = mean * (1 - start), var * (1 - start) + start
    return _distance(*running, mean, var), _distance(*running, *mixed)


def doctor(
    model: nn.Module,
    loader_or_batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Diagnosis:
    """Examine a model's norms, stock or swapped, and report what is wrong, with evidence and a fix.

    It runs up to four batches in training mode, the first one with a backward. Then it runs the
    first batch in evaluation, except that norms use the batch's statistics. Swapped norms run
    PyTorch's kernels, so nothing is compiled. If the model can be copied, a copy runs. Parameters,
    their gradients, buffers, modes, hooks and random number generators are left unchanged, bit for
    bit. A finding that claims an effect has been tried on the copy.

    Args:
        model: any module; each process of a distributed run passes its own.
        loader_or_batch: a batch, or an iterable of batches, such as a DataLoader or a list.
            docs/doctor.md says how a batch is read, such as (inputs, labels).
        loss: called with the model's output and the batch, on the model's device, for the backward;
            None takes the mean square of all outputs.
        optimizer: the optimizer whose weight decay is examined; None skips that.

    Returns:
        A `Diagnosis`: print it, or read its `findings`.

    Warns:
        UserWarning: the model has no norm layer.

    Raises:
        TypeError: `model` is not a module, or `loader_or_batch` or `optimizer` of another type.
        ValueError: there is no batch.
        RuntimeError: the model does not take a batch.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> print(doctor(model, torch.randn(8, 3, 6, 6)).findings[0].finding)
        a bias before a BatchNorm, which has no effect
    """
    _checks.module("doctor", model)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        rule, got = "a torch.optim.Optimizer, or None", type(optimizer).__name__
        raise TypeError(_checks.must("doctor", "optimizer", rule, got))
    inner = runnable(model)
    twin = _copy_of(inner)
    reader = Reader("doctor", inner if twin is None else twin)
    examination = Examination(inner, reader)
    if not examination.seen:
        kind = type(inner).__name__
        _checks.warn(
            f"normplug.doctor: there is nothing to examine: {kind} has no norm layer."
        )
    with runs.untouched(inner) if twin is None else runs.uncompiled():
        data = examination.run(loader_or_batch, loss)
        trials = None if twin is None else Trials(reader, data[0], examination.modes)
        claims = list(_tried(_of_neighbours(examination), trials))
        for claim in _of_growth(examination):
            claims.append(claim._replace(values=(_fix_of_growth(trials, data[0]),)))
    running = runs.running_layers(inner)
    started = sum(not _is_at_start(layer) for layer in running.values())
    decays = _decays(optimizer)
    for path, seen in examination.seen.items():
        claims += _of_decay(seen, decays, type(optimizer).__name__)
        claims += _of_missing_statistics(seen)
        if seen.trained:
            claims += _of_input(seen)
        if path in running:
            claims += _of_statistics(seen, started)
            claims += _of_modes(seen, inner)
    claims += _of_evaluation(examination)
    prefix = next(name for name, m in model.named_modules() if m is inner)
    return Diagnosis(tuple(_with_fix(model, prefix, claim) for claim in claims))


def _copy_of(model: nn.Module) -> nn.Module | None:
    """A copy of a model without backward hooks; None if it cannot be copied, as under FSDP."""
    try:
        twin = duplicate(model)
    except Exception:
        return None
    for module in twin.modules():
        for hooks in runs.backward_hooks(module):
            hooks.clear()
    return twin


def _decays(optimizer: torch.optim.Optimizer | None) -> dict[int, float]:
    """The id of each parameter that an optimizer has -> its weight decay."""
    decays = {}
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            decays[id(parameter)] = group.get("weight_decay", 0)
    return decays


def _with_fix(model: nn.Module, prefix: str, claim: _Claim) -> Finding:
    path = ".".join(filter(None, [prefix, claim.path]))
    layer = f'model.get_submodule("{path}")'
    recalibrate = "normplug.recalibrate(model, loader)"
    module = model.get_submodule(path)
    if runs.is_frozen(module):
        trains = any(p.requires_grad for p in module.parameters())
        refreeze = f"normplug.freeze({layer}{', affine=False' if trains else ''})"
        recalibrate = f"normplug.thaw({layer}); {recalibrate}; {refreeze}"
    fix = _FIXES[claim.finding].format(
        *claim.values,
        path=path,
        layer=layer,
        recalibrate=recalibrate,
        safe='normplug.swap(model, statistics="safe")',
    )
    return Finding(path, claim.finding, claim.evidence, fix)
