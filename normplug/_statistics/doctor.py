"""`doctor`: what is wrong with a model's norms, by evidence, and how to fix it.

Hooks measure some batches in training and one in evaluation; the rules then judge what was seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normplug import _checks, _convert, modules
from normplug._ops.batch_norm_sync import group_to_join
from normplug._statistics.runs import (
    batches,
    gathered,
    is_frozen,
    run,
    running_layers,
    untouched,
)
from normplug._swap.inventory import Inventory
from normplug._table import Rows, shown
from normplug._torch import BatchNormBase, in_backward, tree_leaves

_BATCHES = 4
_FEW = 16  # values per channel
_HALF = (torch.float16, torch.bfloat16)
# Subclasses may permute their input.
_OF_ROWS = (nn.LayerNorm, nn.RMSNorm, modules.LayerNorm, modules.RMSNorm)
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECALIBRATE = "normplug.recalibrate(model, loader)"
_SAFE = 'normplug.swap(model, statistics="safe")'


class Finding(NamedTuple):
    """One finding of `doctor`.

    Attributes:
        layer: the layer's path; "" is the model itself.
        finding: what is wrong.
        evidence: the figures that show it.
        fix: a line of code, or what to change.
    """

    layer: str
    finding: str
    evidence: str
    fix: str


class Diagnosis(Rows[Finding]):
    """The findings of `doctor`; `print` it for a table."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings; () for a healthy model."""
        return self.rows

    def columns(self) -> dict[str, list[str]]:
        cells = [(shown(row.layer), *row[1:]) for row in self]
        return {name: [cell[i] for cell in cells] for i, name in enumerate(Finding._fields)}

    def summary(self) -> str:
        return f"findings: {len(self)}"

    def __str__(self) -> str:
        return super().__str__() if self.rows else "no findings"


class _Seen:
    """What was seen of one norm layer.

    Attributes:
        calls: its calls in the first forward.
        trains: whether it normalised by its batch in them.
        repeats: its calls inside a backward.
        rows: for each training call, the `_moments` of its input.
        evaluated: the `_moments` of its input in evaluation, or None.
    """

    def __init__(self) -> None:
        self.calls = self.repeats = 0
        self.trains = False
        self.rows: list[_Moments] = []
        self.evaluated: _Moments | None = None
        self.x: Any = None  # the last input, without values


class _Moments(NamedTuple):
    """Mean and variance of each channel or row, and squared standard errors of both.

    A sample is one observation in the errors, as its values depend on each other. `values` is how
    many there are of each.
    """

    mean: Tensor
    var: Tensor
    mean_error: Tensor
    var_error: Tensor
    values: int


def _moments(layer: Any, x: Tensor) -> _Moments | None:
    """The moments over which a layer normalises its input; None if they are not known."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(layer, BatchNormBase):
        x = x.flatten(2) if x.dim() > 2 else x[..., None]
        var, mean = torch.var_mean(x, (0, 2), correction=0)
        squares = (x - mean[:, None]).square().mean(2)
        spread, n = max(len(x) - 1, 1), x.shape[0] * x.shape[2]
        errors = [(x.mean(2) - mean).square().mean(0), (squares - var).square().mean(0)]
        return _Moments(mean, var, errors[0] / spread, errors[1] / spread, n)
    if isinstance(layer, nn.GroupNorm) and x.dim() > 1:
        x = x.reshape(len(x) * layer.num_groups, -1)
    elif _convert.plain_class(layer) in _OF_ROWS:
        x = x.flatten(x.dim() - len(layer.normalized_shape))
    else:
        return None
    var, mean = torch.var_mean(x, -1, correction=0)
    return _Moments(mean.flatten(), var.flatten(), var.flatten(), var.flatten(), x.shape[-1])


class _Readers(TorchFunctionMode):
    """Marks tensors that operations outside norms read, and finds what a norm reads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0  # how many norms are running
        # (the module before, its path, the norm, its path, the tensor between)
        self.pairs: list[tuple[Any, str, Any, str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside and isinstance(result, (Tensor, tuple, list)):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and hasattr(each, "_normplug_made"):
                    each._normplug_read = True  # type: ignore[attr-defined]
        return result


class _Examination:
    """Runs a model under hooks, and keeps what they see."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        self.model, self.loss = model, loss
        self.norms: dict[str, Any] = {names[0]: m for m, names in Inventory(model).norms.items()}
        self.running = running_layers(model)
        self.seen = {path: _Seen() for path in self.norms}
        self.readers = _Readers()
        self.first = True

    def run(self, data: list[Any]) -> None:
        """Run the batches in training, the first one with a backward, and one in evaluation."""
        with ExitStack() as hooks:
            for path, module in self.model.named_modules():
                if path in self.norms:
                    hook = module.register_forward_pre_hook(partial(self._before, path))
                    hooks.callback(hook.remove)
                if path in self.norms or isinstance(module, _LINEAR):
                    hook = module.register_forward_hook(partial(self._after, path))
                    hooks.callback(hook.remove)
            if not self.model.training:
                for module in self.model.modules():
                    module.training = not is_frozen(module)
            self._with_backward(data[0])
            self.first = False
            with torch.no_grad():
                for batch in data[1:]:
                    run(self.model, batch)
                for module in self.model.modules():
                    module.training = False
                run(self.model, data[0])

    def _with_backward(self, batch: Any) -> None:
        parameters = [(p, p.grad) for p in self.model.parameters()]
        try:
            for p, _ in parameters:
                p.grad = None
            with torch.enable_grad():
                with self.readers:
                    output = run(self.model, batch)
                # Only the shapes are needed from here on.
                self.readers.pairs = [
                    (*pair[:-1], (pair[-1].shape, not hasattr(pair[-1], "_normplug_read")))
                    for pair in self.readers.pairs
                ]
                if self.loss is not None:
                    loss: Any = self.loss(output, batch)
                else:
                    leaves = (t for t in tree_leaves(output) if isinstance(t, Tensor))
                    loss = sum(t.float().square().mean() for t in leaves if t.requires_grad)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.backward()
        finally:
            for p, grad in parameters:
                p.grad = grad

    def _before(self, path: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen, x = self.seen[path], inputs[0] if inputs else None
        if in_backward():
            seen.repeats += 1
            return
        if not isinstance(x, Tensor) or x.numel() == 0:
            return
        if self.first:
            self.readers.inside += 1
            seen.calls += 1
            seen.trains = layer.training
            made = getattr(x, "_normplug_made", None)
            if made is not None and made[2] == x._version:
                self.readers.pairs.append((*made[:2], layer, path, x))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            moments = _moments(layer, x)
        seen.x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if moments is not None and self.model.training:
            seen.rows.append(moments)
        elif path in self.running:
            seen.evaluated = moments

    def _after(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self.first or in_backward():
            return
        if path in self.norms and self.readers.inside:
            self.readers.inside -= 1
        if isinstance(output, Tensor):
            output._normplug_made = (module, path, output._version)  # type: ignore[attr-defined]


def doctor(
    model: nn.Module,
    loader_or_batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Diagnosis:
    """Examine a model's norms, stock or swapped, and report what is wrong, with evidence and a fix.

    It runs up to four batches in training mode, one of them with a backward, and one in evaluation.
    Parameters, their gradients, buffers, modes, hooks and random number generators are left as they
    were, bit for bit.

    Args:
        model: any module; each process of a distributed run passes its own.
        loader_or_batch: a batch (a tensor, a tuple whose first element is the input, or a mapping
            of keywords), or an iterable of batches, such as a DataLoader or a list.
        loss: called with the model's output and the batch, for the backward; None takes the mean
            square of all outputs.
        optimizer: whose weight decay is examined; None skips that.

    Returns:
        A `Diagnosis`: print it, or read its `findings`, each with the layer's path, the finding,
        the evidence in figures and a fix.

    Raises:
        TypeError: `model` is not a module, or `loader_or_batch` of another type.
        ValueError: there is no batch.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> print(doctor(model, torch.randn(8, 3, 6, 6)).findings[0].finding)
        a bias before a BatchNorm, which has no effect
    """
    _checks.module("doctor", model)
    single = isinstance(loader_or_batch, (Tensor, Mapping, tuple))
    given = [loader_or_batch] if single else loader_or_batch
    data = list(batches("doctor", given, _BATCHES))
    if not data:
        raise ValueError("normplug.doctor: the loader gave no batch.")
    found = _Examination(model, loss)
    with untouched(model):
        found.run(data)
    rules = (_buffers, _momentum, _modes, _ranks, _inputs, _neighbours, _calls, _growth, _gaps)
    rows = [row for rule in rules for row in rule(found)]
    return Diagnosis((*rows, *_decay(found, optimizer)))


def _get(path: str) -> str:
    return f'model.get_submodule("{path}")'


def _is_started(layer: Any) -> bool:
    """Whether a layer has counted a batch, or has no counter."""
    counter = layer.num_batches_tracked
    return counter is None or bool(counter > 0)


def _buffers(found: _Examination) -> Iterator[Finding]:
    started = [path for path, layer in found.running.items() if _is_started(layer)]
    for path, layer in found.running.items():
        values = torch.stack([layer.running_mean.float(), layer.running_var.float()])
        bad = int((~values.isfinite()).any(0).sum())
        if bad:
            text = f"{bad} of {values.shape[1]} channels have nan or inf"
            yield Finding(path, "poisoned running statistics", text, f"{_RECALIBRATE}; {_SAFE}")
        if layer.running_var.dtype in _HALF:
            text = f"they are {layer.running_var.dtype}"
            yield Finding(path, "statistics in half precision", text, f"{_get(path)}.float()")
        at_start = not (values[0].any() or (values[1] - 1).any())
        if started and at_start and path not in started:
            text = f"mean 0, variance 1, 0 batches, and {len(started)} other layers have counted"
            yield Finding(path, "running statistics at their start", text, _RECALIBRATE)


def _momentum(found: _Examination) -> Iterator[Finding]:
    for path, layer in found.running.items():
        if layer.momentum is None or layer.num_batches_tracked is None or is_frozen(layer):
            continue
        steps = int(layer.num_batches_tracked)
        rest = (1 - layer.momentum) ** steps
        if steps and rest > 0.25:
            text = f"after {steps} batches {rest:.0%} of the statistics is their start"
            fix = f"{_get(path)}.momentum = {min(1.0, 3 / steps):.2g}, or {_RECALIBRATE}"
            yield Finding(path, "a momentum too slow for the steps trained", text, fix)


def _modes(found: _Examination) -> Iterator[Finding]:
    for path, layer in found.running.items():
        own = list(layer.parameters(recurse=False))
        if own and layer.training and not any(p.requires_grad for p in own):
            text = "requires_grad is False, training is True"
            fix = f'normplug.freeze(model, include="{path}")'
            yield Finding(path, "a frozen weight, and statistics that move", text, fix)


def _ranks(found: _Examination) -> Iterator[Finding]:
    for path, layer in found.running.items():
        first, *others = gathered(
            torch.stack([layer.running_mean.float(), layer.running_var.float()])
        )
        off = max(((each - first).abs().max().item() for each in others), default=0.0)
        if off > 0:
            text = f"by up to {off:.3g} over {1 + len(others)} processes"
            fix = "normplug.sync_buffers(model)"
            yield Finding(path, "statistics that differ between ranks", text, fix)


def _inputs(found: _Examination) -> Iterator[Finding]:
    for path, layer in found.norms.items():
        seen = found.seen[path]
        if not seen.rows:
            continue
        x, (mean, var, _, _, count) = seen.x, seen.rows[0]
        eps = getattr(layer, "_eps", getattr(layer, "eps", None)) or 0.0  # None: an RMSNorm's
        is_batch_norm = isinstance(layer, BatchNormBase)
        if is_batch_norm and count < _FEW and seen.trains and group_to_join(None) is None:
            text = f"{count} values for each channel of input of shape {tuple(x.shape)}"
            fix = "normplug.swap(model, sync=True) on several GPUs, a larger batch, or GroupNorm"
            yield Finding(path, "too few values a channel", text, fix)
        dead = float((var <= 1e-6 * eps).float().mean())
        if is_batch_norm and dead > 0 and count > 1:
            text = f"{dead:.0%} of {len(var)} channels have variance 0"
            fix = "remove these channels, or start their weights anew"
            yield Finding(path, "dead channels", text, fix)
        elif var.median() < 0.1 * eps and count > 1:
            text = f"the median variance is {var.median():.2g}, and eps={eps:g}"
            yield Finding(path, "eps dominates the variance", text, f"{_get(path)}.eps = 1e-12")
        far = float((mean.abs() > 64 * var.sqrt()).float().mean())
        if x.dtype in _HALF and far > 0.01 and dead == 0:
            ratio = (mean.abs() / var.sqrt()).max()
            text = f"|mean| is up to {ratio:.3g} standard deviations in {x.dtype}"
            fix = "subtract the mean before the cast, or compute its input in float32"
            yield Finding(path, "cancellation: a mean far above the deviation", text, fix)
        if isinstance(layer, nn.GroupNorm) and count == 1:
            text = f"input of shape {tuple(x.shape)} in {layer.num_groups} groups"
            fix = f"fewer groups: nn.GroupNorm(1, {layer.num_channels})"
            yield Finding(path, "one value a group: the output is the bias", text, fix)


def _neighbours(found: _Examination) -> Iterator[Finding]:
    for made, before, norm, path, (shape, alone) in found.readers.pairs:
        if isinstance(made, _LINEAR):
            rows = _convert.plain_class(norm) in _OF_ROWS
            if rows and len(shape) == 4 and not isinstance(made, nn.Linear):
                text = f"it normalises the width of input (N, C, H, W) = {tuple(shape)}"
                fix = f"permute before {path}: x.permute(0, 2, 3, 1), and back after it"
                yield Finding(path, "LayerNorm over the wrong axis", text, fix)
            bias = made.bias
            if alone and isinstance(norm, BatchNormBase) and bias is not None and bias.any():
                text = f"{path} subtracts the mean; the bias has {bias.numel()} parameters"
                fix = f"{type(made).__name__}(..., bias=False)"
                yield Finding(before, "a bias before a BatchNorm, which has no effect", text, fix)
        elif alone and made is not norm:
            text = f"{path} normalises its output at once"
            fix = f"replace {before} by nn.Identity()"
            yield Finding(before, "a norm without effect", text, fix)


def _calls(found: _Examination) -> Iterator[Finding]:
    for path, layer in found.running.items():
        seen = found.seen[path]
        if not seen.trains:
            continue
        safe = getattr(layer, "statistics", "torch") == "safe"
        if seen.repeats and not safe:
            text = f"{seen.repeats} call(s) in the backward: each batch counts again"
            yield Finding(path, "a BatchNorm under activation checkpointing", text, _SAFE)
        if seen.calls > 1:
            text = f"{seen.calls} calls in one forward share its running statistics"
            fix = "a layer for each call, or normplug.recalibrate(model, loader) before evaluation"
            yield Finding(path, "a BatchNorm that is called several times", text, fix)


def _growth(found: _Examination) -> Iterator[Finding]:
    """Variances of like norms in numbered blocks."""
    series: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for path in found.norms:
        numbered = re.match(r"(.*?)\.?\b\d+\.(.+)$", path)
        if numbered and found.seen[path].rows:
            variance = found.seen[path].rows[0].var.mean().item()
            series.setdefault(numbered.groups(), []).append((path, variance))  # type: ignore[arg-type]
    for blocks in series.values():
        (_, first), (path, last) = blocks[0], blocks[-1]
        if len(blocks) >= 4 and first > 0 and math.isfinite(last) and last > 300 * first:
            rate = (last / first) ** (1 / (len(blocks) - 1))
            if rate > 1.5:
                text = f"from {first:.3g} to {last:.3g} over {len(blocks)} blocks: {rate:.2f} each"
                fix = 'normplug.swap(model, normplug.by_depth("1/l")), or scale each branch down'
                yield Finding(path, "residual variance that grows with depth", text, fix)


def _gaps(found: _Examination) -> Iterator[Finding]:
    """Statistics that do not describe the data; if all do, the first that misses evaluation's."""
    stale = False
    for path, layer in found.running.items():
        seen = found.seen[path]
        if not (isinstance(layer, BatchNormBase) and seen.rows and _is_started(layer)):
            continue
        text = _off(layer, seen.rows)
        if text:
            stale = True
            finding = "running statistics stale, or of other data"
            yield Finding(path, finding, text, _RECALIBRATE)
    for path, layer in found.running.items() if not stale else ():
        seen = found.seen[path]
        if seen.evaluated is not None and isinstance(layer, BatchNormBase) and _is_started(layer):
            text = _off(layer, [seen.evaluated])
            if text:
                finding = "a gap between training and evaluation"
                fix = "move dropout after the norm, or freeze the norm before the last epochs"
                yield Finding(path, finding, f"in evaluation, {text}", fix)
                return


def _off(layer: Any, rows: list[_Moments]) -> str:
    """By how much running statistics are off from the data's; "" if sampling explains it."""
    each = zip(*(row[:4] for row in rows), strict=True)
    mean, var, mean_error, var_error = (torch.stack(calls).mean(0) for calls in each)
    steps = int(layer.num_batches_tracked or 10**9)
    momentum = 1 / steps if layer.momentum is None else layer.momentum
    sampling = momentum / (2 - momentum) + 1 / len(rows)
    start = 0.0 if layer.momentum is None else (1 - momentum) ** steps
    running = layer.running_mean.to(mean), layer.running_var.to(var).clamp(min=1e-30)
    if not (running[0].isfinite().all() and running[1].isfinite().all()):
        return ""
    # What is left of the start of the statistics is no fault of theirs.
    expected = mean * (1 - start), var * (1 - start) + start
    off = torch.minimum((running[0] - mean).abs(), (running[0] - expected[0]).abs())
    ratio = torch.minimum(
        (running[1] / var.clamp(min=1e-30)).log().abs(), (running[1] / expected[1]).log().abs()
    )
    relative = off / var.clamp(min=1e-30).sqrt()
    z_mean = off / (mean_error * sampling).clamp(min=1e-30).sqrt()
    z_var = ratio * var / (var_error * sampling).clamp(min=1e-30).sqrt()
    rms = [each.square().mean().sqrt().item() for each in (relative, z_mean, ratio, z_var)]
    # Training moves weights, so smaller differences are healthy.
    if not ((rms[0] > 1.0 and rms[1] > 4) or (rms[2] > math.log(2.0) and rms[3] > 4)):
        return ""
    return (
        f"the mean is off by {rms[0]:.2g} standard deviations ({rms[1]:.3g} standard errors), the "
        f"variance by a factor of {math.exp(min(rms[2], 99)):.3g} ({rms[3]:.3g} standard errors)"
    )


def _decay(found: _Examination, optimizer: torch.optim.Optimizer | None) -> Iterator[Finding]:
    if optimizer is None:
        return
    decays = {id(p): g.get("weight_decay", 0) for g in optimizer.param_groups for p in g["params"]}
    for path, layer in found.norms.items():
        decay = max((decays.get(id(p), 0) for p in layer.parameters(recurse=False)), default=0)
        if decay:
            fix = f"optimizer = ...(normplug.param_groups(model, {decay:g}))"
            yield Finding(path, "norm parameters that decay", f"weight_decay={decay:g}", fix)
