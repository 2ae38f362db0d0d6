"""`doctor`: what is wrong with a model's norms, by evidence, and how to fix it.

Hooks measure some batches in training and one in evaluation; the rules then judge what was seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normplug import _checks, _convert, modules
from normplug._batches import Reader
from normplug._ops.peers import group_to_join
from normplug._statistics import groups, runs
from normplug._swap.inventory import Inventory
from normplug._table import Rows
from normplug._torch import BatchNormBase, in_backward, tree_leaves
from normplug.modules import TargetVarianceNorm
from normplug.reference import channel_dims

_BATCHES = 4
_HALF = (torch.float16, torch.bfloat16)
# Subclasses may permute their input.
_OF_ROWS = (nn.LayerNorm, nn.RMSNorm, modules.LayerNorm, modules.RMSNorm)
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Thresholds. Healthy models are inside all of them, at their start and after some training.
_FEW = 16  # values of a channel
_DEAD = 1e-9  # variance of a channel, in units of eps
_DOMINATED = 0.1  # median variance, in units of eps
_FAR = 64  # mean, in standard deviations
_START = 0.25  # share that the start of running statistics has in them
_OFF = 1.0, math.log(2)  # means in standard deviations, and log variances
_ERRORS = 4  # standard errors beyond that
_GROWTH = 1.5, 300  # of the variance: in a block, and in all

# Finding -> its fix for the layer at {path}; {0} is a value that the rule yields.
_FIXES = {
    "poisoned running statistics": "{recalibrate}; {safe}",
    "running statistics at their start": "{recalibrate}",
    "running statistics stale, or of other data": "{recalibrate}",
    "a gap between training and evaluation": "move dropout after the norm, or freeze the norm",
    "a momentum too slow for the steps trained": "{layer}.momentum = {0:.2g}, or {recalibrate}",
    "statistics that differ between ranks": "normplug.sync_buffers(model)",
    "statistics in half precision": "{layer}.float()",
    "a frozen weight, and statistics that move": 'normplug.freeze(model, include="{path}")',
    "too few values a channel": "normplug.swap(model, sync=True), a larger batch, or GroupNorm",
    "dead channels": "remove these channels, or start their weights anew",
    "eps dominates the variance": "{layer}.eps = 1e-12",
    "a bias before a BatchNorm, which has no effect": "{0}(..., bias=False)",
    "a norm without effect": "replace {path} by nn.Identity()",
    "norm parameters that decay": "optimizer = ...(normplug.param_groups(model, {0:g}))",
    "a BatchNorm under activation checkpointing": "{safe}",
    "a BatchNorm that is called several times": "a layer for each call, or {recalibrate}",
    "residual variance that grows with depth": 'normplug.swap(model, normplug.by_depth("1/l"))',
    "cancellation: a mean far above the deviation": "subtract the mean, and then cast to half",
    "LayerNorm over the wrong axis": "x.permute(0, 2, 3, 1) before {path}, and back after it",
    "one value a group: the output is the bias": "fewer groups: nn.GroupNorm(1, {0})",
}


class Finding(NamedTuple):
    """One finding of `doctor`."""

    layer: str  # its path; "" is the model itself
    finding: str
    evidence: str  # in figures
    fix: str  # a line of code, or what to change


class Diagnosis(Rows[Finding]):
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


class _Moments(NamedTuple):
    """Mean and variance of each channel or row of an input, and how many values and samples."""

    mean: Tensor
    var: Tensor
    values: int  # of each channel or row
    samples: int


def _moments(layer: Any, x: Tensor) -> _Moments | None:
    """The moments over which a layer normalises its input; None if they are not known."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    samples = len(x)
    if isinstance(layer, BatchNormBase):
        dims = channel_dims(x)
    elif isinstance(layer, nn.GroupNorm) and x.dim() > 1:
        x, dims = x.reshape(samples * layer.num_groups, -1), (1,)
    elif _convert.plain_class(layer) in _OF_ROWS:
        dims = tuple(range(-len(layer.normalized_shape), 0))
    else:
        return None
    var, mean = torch.var_mean(x, dims, correction=0)
    return _Moments(mean.flatten(), var.flatten(), x.numel() // mean.numel(), samples)


@dataclass
class _Seen:
    """What was seen of one norm layer."""

    layer: Any
    calls: int = 0  # in the first forward
    repeats: int = 0  # calls inside a backward
    trains: bool = False  # whether it normalised by its batch in the first forward
    x: Any = None  # the last input, without values
    trained: list[_Moments] = field(default_factory=list)  # of its inputs in training
    evaluated: _Moments | None = None  # of its input in evaluation, of the first batch


class _Examination(TorchFunctionMode):
    """Runs a model under hooks, and keeps what they see.

    As a mode, it marks outputs of layers that operations outside norms read.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self.model = model = reader.model
        self.seen = {names[0]: _Seen(layer) for layer, names in Inventory(model).norms.items()}
        self.running = runs.running_layers(model)
        self.phase = "first"  # then "training" and "evaluation"
        self.inside = 0  # how many norms are running
        # (the module before a norm, its path, the norm's path, the tensor between)
        self.pairs: list[tuple[Any, str, str, Any]] = []
        self.neighbours: list[tuple[Any, ...]] = []  # what `_of_neighbours` has found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside and isinstance(result, (Tensor, tuple, list)):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and hasattr(each, "_normplug_made"):
                    each._normplug_read = True  # type: ignore[attr-defined]
        return result

    def run(self, loader: Any, loss: Any) -> None:
        """Run the batches in training, the first one with a backward, and again in evaluation."""
        modules = dict(self.model.named_modules())
        if not self.model.training:
            for module in modules.values():
                module.training = not runs.is_frozen(module)
        data = list(self.reader.batches(loader, _BATCHES))
        self.reader.call(data[0])
        with ExitStack() as undo:
            for path, module in modules.items():
                if isinstance(module, TargetVarianceNorm):  # nothing to compile
                    undo.callback(setattr, module, "backend", module.backend)
                    module.backend = "torch"
                before, after = partial(self._before, path), partial(self._after, path)
                if path in self.seen:
                    undo.callback(module.register_forward_pre_hook(before).remove)
                if path in self.seen or isinstance(module, _LINEAR):
                    undo.callback(module.register_forward_hook(after).remove)
            for parameter in self.model.parameters():
                undo.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None
            with torch.enable_grad():
                self._first_batch(data[0], loss)
            with torch.no_grad():
                for batch in data[1:]:
                    self.reader.run(batch)
                self.phase = "evaluation"  # of all but the norms
                norms = {seen.layer for seen in self.seen.values()}
                for module in modules.values():
                    module.training = module.training and module in norms
                self.reader.run(data[0])

    def _first_batch(self, batch: Any, loss: Any) -> None:
        with self:
            output = self.reader.run(batch)
        self.phase = "training"
        self.neighbours, self.pairs = list(_of_neighbours(self)), []
        if loss is None:
            outputs = (t for t in tree_leaves(output) if isinstance(t, Tensor))
            value = sum(t.float().square().mean() for t in outputs if t.requires_grad)
        else:
            value = loss(output, self.reader.prepared(batch))
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()

    def _before(self, path: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen = self.seen[path]
        x: Any = inputs[0] if inputs else None
        if in_backward():
            seen.repeats += 1
            return
        if self.phase == "first":
            self.inside += 1
            seen.calls += 1
            seen.trains = layer.training
            if hasattr(x, "_normplug_made"):
                self.pairs.append((*x._normplug_made, path, x))
        if not isinstance(x, Tensor) or x.numel() == 0:
            return
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            moments = _moments(layer, x)
        seen.x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if self.phase == "evaluation":
            seen.evaluated = moments
        elif moments is not None:
            seen.trained.append(moments)

    def _after(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.phase != "first" or in_backward():
            return
        if path in self.seen:
            self.inside -= 1
        if isinstance(output, Tensor):
            output._normplug_made = (module, path)  # type: ignore[attr-defined]


def _is_started(layer: Any) -> bool:
    """Whether a layer has counted a batch, or has no counter."""
    counter = layer.num_batches_tracked
    return counter is None or bool(counter > 0)


# Rules of one layer yield the finding, the evidence, and a value that the fix names; the others
# yield the layer's path before that.
_Rows = Iterator[tuple[Any, ...]]


def _of_statistics(seen: _Seen, started: int) -> _Rows:
    layer, tracked = seen.layer, seen.layer.num_batches_tracked
    values = torch.stack([layer.running_mean.float(), layer.running_var.float()])
    if bad := int((~values.isfinite()).any(0).sum()):
        text = f"{bad} of {len(values[0])} channels have nan or inf"
        yield "poisoned running statistics", text
    if layer.running_var.dtype in _HALF:
        yield "statistics in half precision", f"they are {layer.running_var.dtype}"
    at_start = not (values[0].any() or (values[1] - 1).any())
    if started and at_start and not _is_started(layer):
        text = f"mean 0, variance 1, 0 batches, and {started} other layers have counted"
        yield "running statistics at their start", text
    if tracked is not None and layer.momentum is not None and not runs.is_frozen(layer):
        steps = int(tracked)
        rest = (1 - layer.momentum) ** steps
        if steps and rest > _START:
            text = f"after {steps} batches {rest:.0%} of the statistics is their start"
            yield "a momentum too slow for the steps trained", text, min(1.0, 3 / steps)
    first, *others = runs.gathered(values)
    off = max(((each - first).abs().max().item() for each in others), default=0.0)
    if off > 0:
        text = f"by up to {off:.3g} over {1 + len(others)} processes"
        yield "statistics that differ between ranks", text


def _of_modes(seen: _Seen) -> _Rows:
    layer, own = seen.layer, list(seen.layer.parameters(recurse=False))
    if own and layer.training and not any(p.requires_grad for p in own):
        text = "requires_grad is False, training is True"
        yield "a frozen weight, and statistics that move", text
    if seen.trains and seen.repeats and getattr(layer, "statistics", "torch") != "safe":
        text = f"{seen.repeats} call(s) in the backward: each batch counts again"
        yield "a BatchNorm under activation checkpointing", text
    if seen.trains and seen.calls > 1:
        text = f"{seen.calls} calls in one forward share its running statistics"
        yield "a BatchNorm that is called several times", text


def _of_input(seen: _Seen) -> _Rows:
    layer, shape, (mean, var, count, _) = seen.layer, tuple(seen.x.shape), seen.trained[0]
    eps = getattr(layer, "_eps", getattr(layer, "eps", None)) or 0.0  # None: an RMSNorm's
    is_batch_norm = isinstance(layer, BatchNormBase)
    if is_batch_norm and count < _FEW and seen.trains and group_to_join(None) is None:
        yield "too few values a channel", f"{count} for input of shape {shape}"
    dead = int((var <= _DEAD * eps).sum())
    if is_batch_norm and dead and count > 1:
        yield "dead channels", f"{dead} of {len(var)} channels have variance 0"
    elif 0 < var.median() < _DOMINATED * eps and count > 1:  # 0: such as queries that start at 0
        text = f"the median variance is {var.median():.2g}, and eps={eps:g}"
        yield "eps dominates the variance", text
    far = float((mean.abs() > _FAR * var.sqrt()).float().mean())
    if seen.x.dtype in _HALF and far > 0.01 and dead == 0:
        ratio = (mean.abs() / var.sqrt()).max()
        text = f"|mean| is up to {ratio:.3g} standard deviations in {seen.x.dtype}"
        yield "cancellation: a mean far above the deviation", text
    if isinstance(layer, nn.GroupNorm) and count == 1:
        text = f"input of shape {shape} in {layer.num_groups} groups"
        yield "one value a group: the output is the bias", text, layer.num_channels


def _of_decay(seen: _Seen, decays: dict[int, float]) -> _Rows:
    norms = groups.norm_parameters(seen.layer)
    if decay := max((decays.get(id(p), 0) for p in norms), default=0):
        yield "norm parameters that decay", f"weight_decay={decay:g}", decay


def _of_neighbours(found: _Examination) -> _Rows:
    for made, before, path, x in found.pairs:
        norm, alone = found.seen[path].layer, not hasattr(x, "_normplug_read")
        if isinstance(made, _LINEAR):
            rows = _convert.plain_class(norm) in _OF_ROWS
            if rows and x.dim() == 4 and not isinstance(made, nn.Linear):
                text = f"it normalises the width of input (N, C, H, W) = {tuple(x.shape)}"
                yield path, "LayerNorm over the wrong axis", text
            bias, kind = made.bias, type(made).__name__
            if alone and isinstance(norm, BatchNormBase) and bias is not None and bias.any():
                text = f"{path} subtracts the mean; the bias has {bias.numel()} parameters"
                yield before, "a bias before a BatchNorm, which has no effect", text, kind
        elif alone and made is not norm:
            yield before, "a norm without effect", f"{path} normalises its output at once"


def _of_growth(found: _Examination) -> _Rows:
    """Variances of like norms in numbered blocks of one width."""
    series: dict[tuple[Any, ...], list[tuple[str, float]]] = {}
    for path, seen in found.seen.items():
        numbered = re.match(r"(.*?)\.?\b\d+\.(.+)$", path)
        if numbered and seen.trained:
            variance, weight = seen.trained[0].var.mean().item(), seen.layer.weight
            like = (*numbered.groups(), None if weight is None else weight.shape)
            series.setdefault(like, []).append((path, variance))
    for blocks in series.values():
        (_, first), (path, last) = blocks[0], blocks[-1]
        if len(blocks) < 4 or not 0 < _GROWTH[1] * first < last < math.inf:
            continue
        rate = (last / first) ** (1 / (len(blocks) - 1))
        if rate > _GROWTH[0]:
            text = f"from {first:.3g} to {last:.3g} over {len(blocks)} blocks: {rate:.2f} each"
            yield path, "residual variance that grows with depth", text


def _of_evaluation(found: _Examination) -> _Rows:
    """Statistics that do not describe the data, and the first input that evaluation changes."""
    changed = False
    for path, seen in found.seen.items():
        if not (isinstance(seen.layer, BatchNormBase) and seen.trained):
            continue
        if seen.evaluated is not None and not changed:
            far = _distance(*seen.evaluated[:2], *seen.trained[0][:2])
            changed = far[0] > _OFF[0] or far[1] > _OFF[1]
            if changed:
                text = f"the same batch in evaluation: {_described(*far)}"
                yield path, "a gap between training and evaluation", text
        if seen.layer.running_mean is not None and _is_started(seen.layer):
            far, samples = _staleness(seen), sum(call.samples for call in seen.trained)
            # Training moves weights, so small differences are healthy. A sample is one observation,
            # as its values depend on each other. Another rule finds inf and nan.
            errors = samples**-0.5, (samples / 2) ** -0.5
            limits = [most + _ERRORS * error for most, error in zip(_OFF, errors, strict=True)]
            if math.isfinite(sum(far)) and (far[0] > limits[0] or far[1] > limits[1]):
                text = f"{_described(*far)}, in {samples} samples"
                yield path, "running statistics stale, or of other data", text


def _staleness(seen: _Seen) -> tuple[float, float]:
    """How far running statistics are from the data's, or from what their start leaves of them."""
    layer = seen.layer
    mean = torch.stack([call.mean for call in seen.trained]).mean(0)
    var = torch.stack([call.var for call in seen.trained]).mean(0)
    start = 0.0
    if layer.momentum is not None and layer.num_batches_tracked is not None:
        start = (1 - layer.momentum) ** int(layer.num_batches_tracked)
    running = layer.running_mean.to(mean), layer.running_var.to(var)
    later = mean * (1 - start), var * (1 - start) + start
    near, far = _distance(*running, mean, var), _distance(*running, *later)
    return min(near[0], far[0]), min(near[1], far[1])


def _distance(mean: Tensor, var: Tensor, to: Tensor, scale: Tensor) -> tuple[float, float]:
    """How far a mean is, in standard deviations, and a log variance: root mean squares."""
    scale = scale.clamp(min=1e-30)
    off, ratio = (mean - to) / scale.sqrt(), (var.clamp(min=1e-30) / scale).log()
    return off.square().mean().sqrt().item(), ratio.square().mean().sqrt().item()


def _described(off: float, ratio: float) -> str:
    factor = math.exp(min(ratio, 99))
    return f"the mean is off by {off:.2g} deviations, the variance by a factor of {factor:.3g}"


def doctor(
    model: nn.Module,
    loader_or_batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Diagnosis:
    """Examine a model's norms, stock or swapped, and report what is wrong, with evidence and a fix.

    It runs up to four batches in training mode, the first one with a backward, and then the first
    one in evaluation, but with norms that use the batch. Swapped norms run PyTorch's kernels, so
    nothing is compiled. Parameters, their gradients, buffers, modes, hooks and random number
    generators are left as they were, bit for bit.

    Args:
        model: any module; each process of a distributed run passes its own.
        loader_or_batch: a batch (a tensor, a tuple whose first element is the input, or a mapping
            of keywords), or an iterable of batches, such as a DataLoader or a list.
        loss: called with the model's output and the batch, for the backward; None takes the mean
            square of all outputs.
        optimizer: whose weight decay is examined; None skips that.

    Returns:
        A `Diagnosis`: print it, or read its `findings`.

    Raises:
        TypeError: `model` is not a module, or `loader_or_batch` of another type.
        ValueError: there is no batch.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> print(doctor(model, torch.randn(8, 3, 6, 6)).findings[0].finding)
        a bias before a BatchNorm, which has no effect
    """
    _checks.module("doctor", model)
    found = _Examination(Reader("doctor", model))
    with runs.untouched(found.model):
        found.run(loader_or_batch, loss)
    started = sum(map(_is_started, found.running.values()))
    groups = [] if optimizer is None else optimizer.param_groups
    decays = {id(p): g.get("weight_decay", 0) for g in groups for p in g["params"]}
    rows = found.neighbours
    for path, seen in found.seen.items():
        own = [*_of_decay(seen, decays), *(_of_input(seen) if seen.trained else ())]
        if path in found.running:
            own += [*_of_statistics(seen, started), *_of_modes(seen)]
        rows += [(path, *row) for row in own]
    rows += [*_of_growth(found), *_of_evaluation(found)]
    return Diagnosis(tuple(_with_fix(*row) for row in rows))


def _with_fix(path: str, finding: str, evidence: str, *values: Any) -> Finding:
    names = {
        "path": path,
        "layer": f'model.get_submodule("{path}")',
        "recalibrate": "normplug.recalibrate(model, loader)",
        "safe": 'normplug.swap(model, statistics="safe")',
    }
    return Finding(path, finding, evidence, _FIXES[finding].format(*values, **names))
