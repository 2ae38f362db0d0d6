"""Whether a swapped model still is one: no layer lost, bypassed, or computing something else."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from normplug import _checks, _convert, modules, reference
from normplug._swap import record as _record
from normplug._swap.swap import unswap
from normplug._table import counts, shown, table
from normplug._torch import tree_leaves
from normplug.modes import NormMode
from normplug.modules import TargetVarianceNorm

# (what it is called, training, with grad): fused and cached paths come and go with these.
_SETTINGS = (("train", True, True), ("eval", False, True), ("eval under no_grad", False, False))
_SPACE = {nn.BatchNorm2d: (2, 2), nn.BatchNorm3d: (2, 2, 2)}


@dataclass(frozen=True)
class CheckedLayer:
    """One normplug layer of a model.

    Attributes:
        path: its name in the model; "" is the model itself.
        kind: its class's name.
        mode: its mode.
        tested: "train, eval, eval under no_grad", or why its output was not compared.
    """

    path: str
    kind: str
    mode: NormMode
    tested: str


@dataclass(frozen=True)
class Report:
    """What `check` looked at, and found to be in order; `print` it for a table."""

    layers: tuple[CheckedLayer, ...]

    def __iter__(self) -> Iterator[CheckedLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        rows = [("path", "class", "mode", "output compared in")]
        rows += [(shown(x.path), x.kind, str(x.mode), x.tested) for x in self.layers]
        return f"{table(rows)}\n{self.summary()}"

    def summary(self) -> str:
        """One line: how many layers in which mode."""
        return f"{len(self.layers)} norm layers in order: " + counts(
            Counter(f"in mode {layer.mode}" for layer in self.layers)
        )


def check(model: nn.Module, *inputs: Any) -> Report:
    """See that what was swapped still is, and computes what it should.

    Looks for layers that another tool has rebuilt or removed since `swap`, and for layers in
    another mode than was set; and compares each layer's `forward` with the formula in
    `normplug.reference`, on a small batch in its dtype and on its device, in training, in
    evaluation, and in evaluation under no_grad. The model stays untouched: buffers, flags,
    gradients and random numbers, and no hook runs.

    Args:
        model: any module that was swapped, or has normplug layers.
        *inputs: a batch for the whole model, whose output is then compared with that of the
            unswapped model, in the same three settings: what shows that something else than a
            layer's forward reads its weight. This runs two copies of the model, with their hooks.

    Returns:
        A `Report`, printable and iterable over one `CheckedLayer` a layer, if all is well.

    Raises:
        RuntimeError: where not, with a line for each thing found.
        ValueError: a model without normplug layers that was not swapped.
        TypeError: where `model` is no module, or TorchScript.

    Example:
        >>> import normplug
        >>> print(check(normplug.swap(nn.Sequential(nn.LayerNorm(8)))).summary())
        1 norm layers in order: 1 in mode golden
    """
    _checks.module("check", model)
    layers = list(_convert.normplug_layers(model))
    if not layers and not _record.exists(model):
        raise ValueError(
            f"normplug.check: {type(model).__name__} has no normplug layers, and no record of a "
            "swap: it was never swapped, was unswapped, or was rebuilt as a whole by another tool. "
            "Use normplug.swap(model, mode) first."
        )
    findings, rows = _record.findings(model), []
    for path, layer in layers:
        untested = _untestable(layer)
        if untested is None:
            findings += [f"{shown(path)}: {problem}" for problem in _problems(layer)]
        tested = untested or ", ".join(name for name, *_ in _settings(layer))
        rows.append(CheckedLayer(path, _convert.plain_class(layer).__name__, layer.mode, tested))
    if inputs and not findings:
        findings += _problems_of_the_whole(model, inputs)
    refuse("check", model, findings)
    return Report(tuple(rows))


def refuse(who: str, model: nn.Module, findings: list[str]) -> None:
    """Raise what was found, if anything."""
    if findings:
        lines = "\n".join(f"  - {finding}" for finding in findings)
        problems = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
        raise RuntimeError(f"normplug.{who}: {problems} found in {type(model).__name__}:\n{lines}")


def _settings(layer: nn.Module) -> list[tuple[str, bool, bool]]:
    # Synchronised statistics are a collective operation, which is not for one process to start.
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    synchronised = hasattr(layer, "process_group") and not alone
    return [setting for setting in _SETTINGS if not (setting[1] and synchronised)]


def _untestable(layer: nn.Module) -> str | None:
    """Why a layer's output cannot be computed here; None where it can."""
    tensors = [*layer._parameters.values(), *layer._buffers.values()]
    present = [t for t in tensors if t is not None]
    if any(is_lazy(t) for t in present):
        return "not compared: no shape yet"
    if any(t.is_meta for t in present):
        return "not compared: on the meta device"
    weight: Tensor | None = layer.weight  # type: ignore[assignment]
    if weight is not None and (type(weight).__name__ == "DTensor" or weight.shape != _shape(layer)):
        return "not compared: sharded"
    cls: Any = type(layer)
    parts = (cls.forward, getattr(cls, "_normalise", cls.forward))
    if any(not part.__module__.startswith(modules.__name__) for part in parts):
        return "not compared: a subclass with a forward of its own"
    return None


def _shape(layer: nn.Module) -> tuple[int, ...]:
    return getattr(layer, "normalized_shape", None) or (layer.num_features,)  # type: ignore[return-value]


def _problems(layer: TargetVarianceNorm) -> list[str]:
    """Where a layer's forward is not the formula."""
    found = []
    patched = " (its forward was replaced on the instance)" if _convert.is_patched(layer) else ""
    for name, training, grad in _settings(layer):
        try:
            with _untouched(layer, training, grad):
                off, allowed = _difference(layer, training)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            found.append(f"in {name}, its forward fails{patched}: {type(error).__name__}: {text}")
            continue
        if not off <= allowed:
            found.append(
                f"in {name}, its output is off the formula of mode {layer.mode} by {off:.3g}, "
                f"where rounding explains {allowed:.1g}{patched}."
            )
    return found


@contextmanager
def _untouched(layer: nn.Module, training: bool, grad: bool) -> Iterator[None]:
    """In a block, one setting, with buffers that are copies; afterwards everything as before."""
    probe = vars(layer).pop("_probe", None)
    parts, was_training = list(layer.modules()), layer.training
    before = [m._buffers for m in parts]
    # Of parameters that were made in inference mode autograd keeps nothing.
    inference = any(p.is_inference() for p in layer.parameters())
    try:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), parametrize.cached():
            for m in parts:
                m._buffers = {k: None if b is None else b.clone() for k, b in m._buffers.items()}
            layer.training = training
            with torch.autocast(_like(layer).device.type, enabled=False):
                yield
    finally:
        layer.training = was_training
        for m, buffers in zip(parts, before, strict=True):
            m._buffers = buffers
        if probe is not None:
            layer._probe = probe


def _like(layer: nn.Module) -> Tensor:
    """A tensor of the dtype and device that the layer's input may have."""
    tensors = (layer.weight, layer.bias, getattr(layer, "running_mean", None))
    return next((t for t in tensors if isinstance(t, Tensor)), torch.empty(0))


def _difference(layer: TargetVarianceNorm, training: bool) -> tuple[float, float]:
    """The largest difference of the layer's output to the formula, and what rounding explains."""
    like, shape = _like(layer), _shape(layer)
    kind = getattr(layer, "_unsynced_class", type(layer))
    space = next((s for cls, s in _SPACE.items() if issubclass(kind, cls)), ())
    generator = torch.Generator().manual_seed(0)
    x = 1 + 2 * torch.randn(8, *shape, *space, generator=generator)
    x = x.to(like.device, like.dtype)
    weight: Tensor | None = layer.weight  # type: ignore[assignment]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    numbers: dict[str, Any] = {"eps": layer.eps, "target_variance": layer.target_variance}
    if isinstance(layer, nn.LayerNorm):
        expected = reference.layer_norm(x, layer.normalized_shape, weight, bias, **numbers).y
    else:
        running = (layer.running_mean, layer.running_var)
        mean, var = (None, None) if training else running
        expected = reference.batch_norm(x, weight, bias, mean=mean, var=var, **numbers).y  # type: ignore[arg-type]
    return _distance(layer.forward(x), expected, max(4 * torch.finfo(x.dtype).eps, 1e-5))


def _distance(got: Tensor, expected: Tensor, tolerance: float) -> tuple[float, float]:
    """The largest difference, and `tolerance` of the largest value; nan and inf must agree."""
    if got.shape != expected.shape:
        raise ValueError(f"its output is of shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    got, expected = got.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return torch.inf, 0.0
    if not finite.any():
        return 0.0, 0.0
    got, expected = got[finite], expected[finite]
    return (got - expected).abs().max().item(), tolerance * expected.abs().max().item()


def _problems_of_the_whole(model: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """Where the whole model does not compute what its unswapped copy does."""
    model = _record.unwrapped(model)
    ours, stock = copy.deepcopy(model), unswap(copy.deepcopy(model))
    found = []
    for name, training, grad in _SETTINGS:
        off, allowed = 0.0, 0.0
        outputs = [_outputs(m.train(training), inputs, grad) for m in (ours, stock)]
        for got, expected in zip(*outputs, strict=True):
            tolerance = max(16 * torch.finfo(expected.dtype).eps, 1e-3)
            distance = _distance(got, expected, tolerance)
            off, allowed = max((off, allowed), distance, key=lambda pair: pair[0] - pair[1])
        if not off <= allowed:
            found.append(
                f"the whole model: in {name}, its output is off that of the unswapped model by "
                f"{off:.3g}, where rounding explains {allowed:.1g}: something reads its norms' "
                "weights, and does not call their forward."
            )
    return found


def _outputs(model: nn.Module, inputs: tuple[Any, ...], grad: bool) -> list[Tensor]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(list(devices)), torch.set_grad_enabled(grad):
        torch.manual_seed(0)
        leaves = tree_leaves(model(*inputs))
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise ValueError("normplug.check: the model's output for these inputs has no float tensor.")
    return tensors
