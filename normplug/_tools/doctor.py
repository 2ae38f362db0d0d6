"""`doctor`: what is wrong with a model's norms, by evidence, and how to fix it.

Hooks measure some batches in training and one in evaluation; the rules then judge what was seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normplug import _checks, _convert, modules
from normplug._batches import Reader, runnable
from normplug._ops.exchange import group_to_join
from normplug._restore import duplicate
from normplug._swap.inventory import Inventory
from normplug._table import Rows
from normplug._tools import groups, runs
from normplug._tools.trials import Trials
from normplug._torch import BatchNormBase, InstanceNormBase, in_backward, tree_leaves
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
_LAST = 0.9  # momentum: the share of the last batch
_GROWTH = 1.5, 300  # of the variance: in a block, and in all

_DEPTH = 'normplug.swap(model, normplug.by_depth("1/l"))'
_BIAS = "a bias before a BatchNorm, which has no effect"
_GROWS = "residual variance that grows with depth"
_IDENTITY = "a norm without effect"

# Finding -> its fix for the layer at {path}; {0} is a value that the rule yields. Code can be run
# as it stands. {recalibrate} of a frozen layer thaws it before, and freezes it again.
_FIXES = {
    "poisoned running statistics": "{recalibrate}; {safe}",
    "running statistics at their start": "{recalibrate}",
    "running statistics stale, or of other data": "{recalibrate}",
    "running statistics that are missing": "{layer}.track_running_stats = False  # if it is meant",
    "a gap between training and evaluation": "move dropout after the norm, or freeze the norm",
    "a momentum too slow for the steps trained": (
        "{recalibrate}  # or train as long again with {layer}.momentum = {0:.2g}"
    ),
    "a momentum that keeps only the last batch": "{layer}.momentum = 0.1; {recalibrate}",
    "statistics that differ between ranks": "normplug.sync_buffers(model)",
    "statistics in half precision": "{layer}.float()",
    "a frozen weight, and statistics that move": 'normplug.freeze(model, include="{path}")',
    "a norm in evaluation, whose weight trains": (
        "{layer}.train()  # or normplug.freeze({layer}, affine=False), if it is meant"
    ),
    "too few values a channel": (
        "a larger batch, GroupNorm, or normplug.swap(model, sync=True) in several processes"
    ),
    "dead channels": "remove these channels, or start their weights anew",
    "eps dominates the variance": "{layer}.{0} = {1:.1g}",
    _BIAS: "{0}(..., bias=False)",
    _IDENTITY: "replace {path} by nn.Identity()",
    "norm parameters that decay": "optimizer = ...(normplug.param_groups(model, {0:g}))",
    "a BatchNorm under activation checkpointing": "{safe}",
    "a BatchNorm that is called on different inputs": "a layer for each call",
    _GROWS: "{0}",
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


def _is_batch_norm(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm, frozen or not."""
    return issubclass(_convert.plain_class(layer), BatchNormBase)


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
    if _is_batch_norm(layer):
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

    layer: Any  # in the model itself, while a copy may have run
    calls: int = 0  # in the first forward
    repeats: int = 0  # calls inside a backward
    trains: bool = False  # whether it normalised by its batch in the first forward
    x: Any = None  # the last input, without values
    trained: list[_Moments] = field(default_factory=list)  # of its inputs in training
    evaluated: _Moments | None = (
        None  # of its first input in evaluation, of the first batch
    )


class _Examination(TorchFunctionMode):
    """Runs a model, or a copy of it, under hooks, and keeps what they see.

    As a mode, it marks outputs of layers that operations outside norms read.

    Args:
        model: the model itself, without wrappers.
        reader: reads for the module that runs.
    """

    def __init__(self, model: nn.Module, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self.seen = {
            names[0]: _Seen(layer) for layer, names in Inventory(model).norms.items()
        }
        self.running = runs.running_layers(model)
        self.phase = "first"  # then "training" and "evaluation"
        self.inside = 0  # how many norms are running
        self.modes: dict[nn.Module, bool] = {}  # in training
        # (the module before a norm, its path, the norm's path, the tensor between)
        self.pairs: list[tuple[Any, str, str, Any]] = []
        self.neighbours: list[tuple[Any, ...]] = []  # what `_of_neighbours` has found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside and isinstance(result, (Tensor, tuple, list)):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and hasattr(each, "_normplug_made"):
                    each._normplug_read = True  # type: ignore[attr-defined]
        return result

    def run(self, loader: Any, loss: Any) -> list[Any]:
        """Run the batches in training, the first with a backward, and again in evaluation.

        Returns the batches.
        """
        modules = dict(self.reader.model.named_modules())
        self._set_modes(modules.values())
        with ExitStack() as undo:
            for module in modules.values():
                if isinstance(module, TargetVarianceNorm):  # nothing to compile
                    undo.callback(setattr, module, "backend", module.backend)
                    module.backend = "torch"
            data = list(self.reader.batches(loader, _BATCHES))
            self.reader.call(data[0])  # before the hooks, since it may try some calls
            self._hook(modules, undo)
            with torch.enable_grad():
                self._first_batch(data[0], loss)
            with torch.no_grad():
                for batch in data[1:]:
                    self.reader.run(batch)
                self.phase = "evaluation"  # of all but the norms
                norms = {modules[path] for path in self.seen}
                for module in modules.values():
                    module.training = module.training and module in norms
                self.reader.run(data[0])
        return data

    def _set_modes(self, modules: Iterable[nn.Module]) -> None:
        if not self.reader.model.training:
            for module in modules:
                module.training = not runs.is_frozen(module)
        self.modes = {module: module.training for module in modules}

    def _hook(self, modules: dict[str, nn.Module], undo: ExitStack) -> None:
        for path, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # it has no hooks
                continue
            before, after = partial(self._before, path), partial(self._after, path)
            if path in self.seen:
                undo.callback(module.register_forward_pre_hook(before).remove)
            if path in self.seen or isinstance(module, _LINEAR):
                undo.callback(module.register_forward_hook(after).remove)

    def _first_batch(self, batch: Any, loss: Any) -> None:
        for parameter in self.reader.model.parameters():
            parameter.grad = None
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
        for parameter in self.reader.model.parameters():
            parameter.grad = None

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
            seen.evaluated = seen.evaluated or moments
        elif moments is not None:
            seen.trained.append(moments)

    def _after(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.phase != "first" or in_backward():
            return
        if path in self.seen:
            self.inside -= 1
        if isinstance(output, Tensor):
            output._normplug_made = (module, path)  # type: ignore[attr-defined]


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


# Rules of one layer yield the finding, the evidence, and values that the fix names; the others
# yield the layer's path before that.
_Rows = Iterator[tuple[Any, ...]]


def _of_statistics(seen: _Seen, started: int) -> _Rows:
    layer = seen.layer
    values = torch.stack([layer.running_mean.float(), layer.running_var.float()])
    if bad := int((~values.isfinite()).any(0).sum()):
        text = f"{bad} of {len(values[0])} channels have nan or inf"
        yield "poisoned running statistics", text
    if layer.running_var.dtype in _HALF:
        yield "statistics in half precision", f"they are {layer.running_var.dtype}"
    if _is_at_start(layer) and seen.trains and started:
        text = f"mean 0, variance 1, and {started} other layers have statistics"
        yield "running statistics at their start", text
    if _is_at_start(layer) and seen.calls and not seen.trains and _is_identity(layer):
        text = "mean 0, variance 1, and in evaluation they stay"
        yield "running statistics at their start", text
    if seen.trains:
        yield from _of_momentum(seen)
    first, *others = runs.gathered(values)
    off = max(((each - first).abs().max().item() for each in others), default=0.0)
    if off > 0:
        text = f"by up to {off:.3g} over {1 + len(others)} processes"
        yield "statistics that differ between ranks", text


def _of_momentum(seen: _Seen) -> _Rows:
    layer = seen.layer
    if layer.momentum is not None and layer.momentum >= _LAST:
        text = f"momentum={layer.momentum:g}, where PyTorch's default is 0.1"
        yield "a momentum that keeps only the last batch", text
    rest = _share_of_start(layer)
    if rest < 1 and rest > _START and seen.trained and not _is_at_start(layer):
        data, mixed = _distances(seen)
        is_mixed = mixed[0] < _OFF[0] and mixed[1] < _OFF[1]
        if is_mixed and 2 * math.hypot(*mixed) < math.hypot(*data):  # else from elsewhere
            steps = int(layer.num_batches_tracked)
            text = f"after {steps} batches {rest:.0%} of the statistics is their start"
            yield "a momentum too slow for the steps trained", text, min(0.5, 3 / steps)


def _of_modes(seen: _Seen, model: nn.Module) -> _Rows:
    layer, own = seen.layer, list(seen.layer.parameters(recurse=False))
    trains = any(p.requires_grad for p in own)
    if own and layer.training and not trains:
        text = "requires_grad is False, training is True"
        yield "a frozen weight, and statistics that move", text
    if trains and model.training and not layer.training and not runs.is_frozen(layer):
        text = "requires_grad is True, training is False; of the model, it is True"
        yield "a norm in evaluation, whose weight trains", text
    if seen.trains and seen.repeats and getattr(layer, "statistics", "torch") != "safe":
        text = f"{seen.repeats} call(s) in the backward: each batch counts again"
        yield "a BatchNorm under activation checkpointing", text
    if seen.trains and seen.calls > 1 and len(seen.trained) >= seen.calls:
        yield from _of_calls(seen)


def _of_calls(seen: _Seen) -> _Rows:
    """Calls in one forward whose inputs differ: no running statistics describe both."""
    first, *others = seen.trained[: seen.calls]
    for other in others:
        far = _distance(*other[:2], *first[:2])
        if _is_far(far, min(first.samples, other.samples)):
            text = f"{seen.calls} calls in one forward; between two of them, {_described(*far)}"
            yield "a BatchNorm that is called on different inputs", text
            return


def _of_input(seen: _Seen) -> _Rows:
    layer, shape, (mean, var, count, _) = seen.layer, tuple(seen.x.shape), seen.trained[0]
    eps_name = getattr(_convert.declared(layer), "_eps_name", "eps")
    eps = (
        getattr(layer, "_eps", getattr(layer, eps_name, None)) or 0.0
    )  # None: an RMSNorm's
    is_batch_norm = _is_batch_norm(layer)
    joins = hasattr(layer, "process_group") and group_to_join(None) is not None
    if is_batch_norm and count < _FEW and seen.trains and not joins:
        yield "too few values a channel", f"{count} for input of shape {shape}"
    dead = int((var <= _DEAD * eps).sum())
    if is_batch_norm and dead and count > 1:
        yield "dead channels", f"{dead} of {len(var)} channels have variance 0"
    elif (
        0 < var.median() < _DOMINATED * eps and count > 1
    ):  # 0: such as queries that start at 0
        text = f"the median variance is {var.median():.2g}, and eps={eps:g}"
        yield "eps dominates the variance", text, eps_name, var.median().item() / 100
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


def _of_missing_statistics(seen: _Seen) -> _Rows:
    layer = seen.layer
    if not isinstance(layer, (BatchNormBase, InstanceNormBase)):
        return
    if layer.track_running_stats and layer.running_mean is None:
        text = f"track_running_stats=True, and the {layer.num_features} channels have no mean"
        yield "running statistics that are missing", text


def _of_neighbours(found: _Examination) -> _Rows:
    """What stands before a norm. `_tried` decides on findings that claim an effect."""
    for made, before, path, x in found.pairs:
        norm, alone = found.seen[path].layer, not hasattr(x, "_normplug_read")
        if isinstance(made, _LINEAR):
            rows = _convert.plain_class(norm) in _OF_ROWS
            if rows and x.dim() == 4 and not isinstance(made, nn.Linear):
                text = f"it normalises the width of input (N, C, H, W) = {tuple(x.shape)}"
                yield path, "LayerNorm over the wrong axis", text
            bias, kind = made.bias, type(made).__name__
            if alone and _is_batch_norm(norm) and bias is not None and bias.any():
                text = (
                    f"{path} subtracts the mean; the bias has {bias.numel()} parameters"
                )
                yield before, _BIAS, text, kind, path
        elif alone and made is not norm:
            yield before, _IDENTITY, f"{path} normalises its output at once", path


def _tried(rows: Iterable[tuple[Any, ...]], trials: Trials | None) -> _Rows:
    """The rows whose claims of an effect hold on a copy of the model; no claim without a copy."""
    for row in rows:
        path, finding, _, *values = row
        if finding == _BIAS:
            holds = trials is not None and trials.is_bias_without_effect(path, values[-1])
        elif finding == _IDENTITY:
            holds = trials is not None and trials.is_norm_without_effect(path, values[-1])
        else:
            holds = True
        if holds:
            yield row


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
            yield path, _GROWS, text


def _fix_of_growth(trials: Trials | None, batch: Any) -> str:
    """`by_depth`, if it ends the growth in a copy of the model."""
    model = None if trials is None else trials.swapped_by_depth()
    if model is not None:
        found = _Examination(model, Reader("doctor", model))
        found.run([batch], None)
        if not list(_of_growth(found)):
            return _DEPTH
    return "smaller weights at the end of each block, or a smaller factor of the block's input"


def _of_evaluation(found: _Examination) -> _Rows:
    """Statistics that do not describe the data, and the first input that evaluation changes."""
    changed = False
    for path, seen in found.seen.items():
        if not (_is_batch_norm(seen.layer) and seen.trained):
            continue
        if seen.evaluated is not None and seen.trains and not changed:
            far = _distance(*seen.evaluated[:2], *seen.trained[0][:2])
            changed = far[0] > _OFF[0] or far[1] > _OFF[1]
            if changed:
                text = f"the same batch in evaluation: {_described(*far)}"
                yield path, "a gap between training and evaluation", text
        if seen.layer.running_mean is not None and not _is_at_start(seen.layer):
            far, samples = _staleness(seen), sum(call.samples for call in seen.trained)
            # Another rule finds inf and nan.
            if math.isfinite(sum(far)) and _is_far(far, samples):
                text = f"{_described(*far)}, in {samples} samples"
                yield path, "running statistics stale, or of other data", text


def _is_far(far: tuple[float, float], samples: int) -> bool:
    """Whether a distance is more than healthy training and sampling explain.

    Training moves weights, so small differences are healthy. A sample is one observation, as its
    values depend on each other.
    """
    mean, log_variance = far
    error = samples**-0.5
    if mean > _OFF[0] + _ERRORS * error:
        return True
    return log_variance > _OFF[1] + _ERRORS * math.sqrt(2) * error


def _distances(seen: _Seen) -> tuple[tuple[float, float], tuple[float, float]]:
    """How far running statistics are from the data's, and from those mixed with their start."""
    layer = seen.layer
    mean = torch.stack([call.mean for call in seen.trained]).mean(0)
    var = torch.stack([call.var for call in seen.trained]).mean(0)
    start = _share_of_start(layer)
    running = layer.running_mean.to(mean), layer.running_var.to(var)
    mixed = mean * (1 - start), var * (1 - start) + start
    return _distance(*running, mean, var), _distance(*running, *mixed)


def _staleness(seen: _Seen) -> tuple[float, float]:
    """How far running statistics are from the data's, or from what their start leaves of them."""
    data, mixed = _distances(seen)
    return min(data[0], mixed[0]), min(data[1], mixed[1])


def _distance(
    mean: Tensor, var: Tensor, to: Tensor, scale: Tensor
) -> tuple[float, float]:
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
    generators are left as they were, bit for bit: a copy of the model runs, if it can be copied. A
    finding that claims an effect has been tried on the copy.

    Args:
        model: any module; each process of a distributed run passes its own.
        loader_or_batch: a batch, or an iterable of batches, such as a DataLoader or a list.
            docs/batches.md says how a batch is read, such as (inputs, labels).
        loss: called with the model's output and the batch, on the model's device, for the backward;
            None takes the mean square of all outputs.
        optimizer: whose weight decay is examined; None skips that.

    Returns:
        A `Diagnosis`: print it, or read its `findings`.

    Raises:
        TypeError: `model` is not a module, or `loader_or_batch` of another type.
        ValueError: there is no batch.
        RuntimeError: the model does not take a batch.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> print(doctor(model, torch.randn(8, 3, 6, 6)).findings[0].finding)
        a bias before a BatchNorm, which has no effect
    """
    _checks.module("doctor", model)
    inner = runnable(model)
    twin = _copy_of(inner)
    reader = Reader("doctor", inner if twin is None else twin)
    found = _Examination(inner, reader)
    with runs.untouched(inner) if twin is None else runs.uncompiled():
        data = found.run(loader_or_batch, loss)
        trials = None if twin is None else Trials(reader, data[0], found.modes)
        rows = list(_tried(found.neighbours, trials))
        for path, finding, evidence in _of_growth(found):
            rows.append((path, finding, evidence, _fix_of_growth(trials, data[0])))
    started = sum(not _is_at_start(layer) for layer in found.running.values())
    decays = _decays(optimizer)
    for path, seen in found.seen.items():
        own = [*_of_decay(seen, decays), *_of_missing_statistics(seen)]
        if seen.trained:
            own += _of_input(seen)
        if path in found.running:
            own += [*_of_statistics(seen, started), *_of_modes(seen, inner)]
        rows += [(path, *row) for row in own]
    rows += _of_evaluation(found)
    prefix = next(name for name, m in model.named_modules() if m is inner)
    return Diagnosis(tuple(_with_fix(model, prefix, *row) for row in rows))


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


def _with_fix(
    model: nn.Module, prefix: str, path: str, finding: str, evidence: str, *values: Any
) -> Finding:
    path = ".".join(filter(None, [prefix, path]))
    layer = f'model.get_submodule("{path}")'
    recalibrate = "normplug.recalibrate(model, loader)"
    if runs.is_frozen(model.get_submodule(path)):
        weight_trains = any(
            p.requires_grad for p in model.get_submodule(path).parameters()
        )
        affine = ", affine=False" if weight_trains else ""
        recalibrate = (
            f"normplug.thaw({layer}); {recalibrate}; normplug.freeze({layer}{affine})"
        )
    names = {
        "path": path,
        "layer": layer,
        "recalibrate": recalibrate,
        "safe": 'normplug.swap(model, statistics="safe")',
    }
    return Finding(path, finding, evidence, _FIXES[finding].format(*values, **names))
