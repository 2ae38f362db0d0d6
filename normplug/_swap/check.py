"""Verify that no layer of a swapped model is lost or bypassed, or computes something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normplug import _checks, _convert
from normplug._batches import Call, Reader
from normplug._ops import subclasses
from normplug._restore import duplicate, seeded
from normplug._swap import record as _record
from normplug._swap.swap import unswap
from normplug._table import Table, counts, shown
from normplug._torch import is_patched, tree_leaves
from normplug.modes import NormMode
from normplug.modules import TargetVarianceNorm
from normplug.modules.base import original_of

# (name, training, grad enabled): fused and cached code paths depend on both flags.
_SETTINGS = (
    ("train", True, True),
    ("eval", False, True),
    ("eval under no_grad", False, False),
)


@dataclass(frozen=True)
class CheckedLayer:
    """One normplug layer of a model.

    Attributes:
        path: its path in the model; "" is the model itself.
        kind: its class's name.
        mode: its mode.
        tested: the settings in which its output was compared, such as "train, eval, eval under
            no_grad", or why it was not compared.
    """

    path: str
    kind: str
    mode: NormMode
    tested: str


class Verified(Table[CheckedLayer]):
    """The layers that `check` verified; `print` it for a table."""

    def columns(self) -> dict[str, list[str]]:
        """The cells of each column."""
        return {
            "path": [shown(layer.path) for layer in self.rows],
            "class": [layer.kind for layer in self.rows],
            "mode": [str(layer.mode) for layer in self.rows],
            "output compared in": [layer.tested for layer in self.rows],
        }

    def summary(self) -> str:
        """One line: the number of layers in each mode."""
        modes = Counter(f"in mode {layer.mode}" for layer in self.rows)
        targets = sorted({layer.mode.target_variance for layer in self.rows})
        text = counts(modes)
        if len(modes) > 4:
            text = f"in {len(modes)} modes from {NormMode(targets[0])} to {NormMode(targets[-1])}"
        layers = "norm layer" if len(self.rows) == 1 else "norm layers"
        return f"{len(self.rows)} {layers} verified: {text}"


def check(model: nn.Module, *batch: Any, **keywords: Any) -> Verified:
    """Verify that a model's swapped layers are still present and compute the right function.

    This finds layers that another tool has rebuilt or removed since `swap`, layers whose mode is
    not the one that was set, and layers that bypass a later patch of their stock class. It compares
    each layer's `forward` with the formula in `normplug.reference`, on a small batch of its dtype
    on its device, in training, in evaluation, and in evaluation under no_grad. The model's buffers,
    flags and gradients, the batch and the random number generators are left untouched. No hook
    runs.

    Args:
        model: any module that was swapped, or has normplug layers.
        *batch: the model's arguments; or a single batch, such as (inputs, labels), or a loader,
            whose first batch is used: docs/doctor.md says how it is read. With a batch, the
            outputs of the model and of the unswapped model are also compared in the same three
            settings. That shows whether anything besides the layers reads their weights. This runs
            copies of the model, with their hooks.
        **keywords: arguments that the model takes by keyword.

    Returns:
        A `Verified` if there is no problem: print it, or iterate over its `CheckedLayer`s, one per
        layer.

    Raises:
        RuntimeError: there are problems; the message lists them, one per line. Or the model does
            not take the batch.
        ValueError: `model` has no normplug layers and was not swapped.
        TypeError: `model` is not a module, is TorchScript, or cannot be copied.

    Warns:
        UserWarning: the model's output for the batch is not compared, because it changes from call
            to call, although the random number generators have the same seed.

    Examples:
        >>> import normplug
        >>> model = normplug.swap(nn.Sequential(nn.LayerNorm(8)))
        >>> print(check(model, torch.randn(2, 8)).summary())
        1 norm layer verified: 1 in mode standard
    """
    _checks.module("check", model)
    layers = list(_convert.normplug_layers(model))
    findings = _record.findings(model)
    rows = []
    if not layers and not findings:
        raise ValueError(
            f"normplug.check: {type(model).__name__} has no normplug layers, and no record of a "
            "swap: it was never swapped, was unswapped, or was rebuilt as a whole by another tool. "
            "Use normplug.swap(model, mode) first."
        )
    for path, layer in layers:
        tested = _untestable(layer)
        if tested is None:
            names, problems = _compared(layer)
            findings += [f"{shown(path)}: {problem}" for problem in problems]
            tested = ", ".join(names)
        rows.append(
            CheckedLayer(path, _convert.plain_class(layer).__name__, layer.mode, tested)
        )
    if (batch or keywords) and not findings:
        findings += _model_problems(_record.unwrapped(model), batch, keywords)
    refuse("check", model, findings)
    return Verified(tuple(rows))


def refuse(caller: str, model: nn.Module, findings: list[str]) -> None:
    """Raise a RuntimeError that lists the findings, if there are any."""
    if findings:
        lines = "\n".join(f"  - {finding}" for finding in findings)
        problems = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
        raise RuntimeError(
            f"normplug.{caller}: {problems} found in {type(model).__name__}:\n{lines}"
        )


def _untestable(layer: TargetVarianceNorm) -> str | None:
    """Why a layer's output cannot be compared; None if it can."""
    present = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if any(t.is_meta for t in present):
        return "not compared: on the meta device"
    weight: Tensor | None = layer.weight  # type: ignore[assignment]
    odd = weight is not None and weight.shape != layer._affine_shape()
    if odd or any(subclasses.is_sharded(t) for t in (weight, *present)):
        return "not compared: sharded"
    cls, sites = type(layer), layer._fusion_sites
    owner = next(base for base in cls.__mro__ if "_expected" in vars(base))
    methods = sites.methods if sites else ("forward",)
    for name in methods:
        if original_of(getattr(cls, name)) is not original_of(getattr(owner, name)):
            return "not compared: a subclass with a forward of its own"
    return None


def _compared(layer: TargetVarianceNorm) -> tuple[list[str], list[str]]:
    """Compare a layer with its formula; return the settings compared, and the mismatches."""
    names = []
    problems = []
    patched = " (its forward was replaced on the instance)" if is_patched(layer) else ""
    for name, training, grad in _SETTINGS:
        generator = torch.Generator().manual_seed(0)
        try:
            with _stand_in(layer, training, grad) as twin:
                if twin.group_to_join() is not None:
                    continue
                names.append(name)
                x = 1 + 2 * torch.randn(*layer._example_shape(), generator=generator)
                x = x.to(_like(layer))
                expected = twin._expected(x, twin.training)
                tolerance = max(4 * torch.finfo(x.dtype).eps, 1e-5)
                away = _distance(twin.forward(x), expected, tolerance)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            problems.append(
                f"in {name}, its forward fails{patched}: {type(error).__name__}: {text}"
            )
            continue
        if away is not None:
            problems.append(
                f"in {name}, its output differs from the formula of mode {layer.mode} by "
                f"{away[0]:.3g}; rounding explains at most {away[1]:.1g}{patched}."
            )
    return names, problems


@contextmanager
def _stand_in(
    layer: TargetVarianceNorm, training: bool, grad: bool
) -> Iterator[TargetVarianceNorm]:
    """Yield a shallow copy of a layer in one setting, with cloned buffers.

    A forward that was replaced on the instance may hold a reference to the instance. Then the layer
    itself is yielded with the copy's attributes, and gets its own back after the block.
    """
    patched = is_patched(layer)
    before = dict(vars(layer))
    # Autograd cannot save parameters that were created in inference mode.
    inference = any(p.is_inference() for p in layer.parameters())
    try:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            parametrize.cached(),
            torch.autocast(_like(layer).device.type, enabled=False),
        ):
            twin = _copy(layer)
            vars(twin).update(training=training, _probe=None)
            if patched:
                vars(layer).update(vars(twin))
                twin = layer
            yield twin
    finally:
        if patched:
            vars(layer).clear()
            vars(layer).update(before)


def _copy(module: Any) -> Any:
    """A copy of a module with the same tensors, but clones of the buffers in it."""
    twin = object.__new__(type(module))
    state = vars(twin)
    state.update(vars(module))
    if not is_patched(module):
        state.pop("forward", None)  # bound to the module
    buffers, children = module._buffers, module._modules
    state["_buffers"] = {k: None if b is None else b.clone() for k, b in buffers.items()}
    state["_modules"] = {k: None if m is None else _copy(m) for k, m in children.items()}
    return twin


def _like(layer: nn.Module) -> Tensor:
    """A tensor with the dtype and device for the layer's test input."""
    tensors = (getattr(layer, name, None) for name in ("weight", "bias", "running_var"))
    return next((t for t in tensors if isinstance(t, Tensor)), torch.empty(0))


def _distance(
    got: Tensor, expected: Tensor, tolerance: float
) -> tuple[float, float] | None:
    """The largest difference, and `tolerance` times the largest value; None if that explains it.

    Values that are not finite must be in the same places; otherwise the difference is infinite.
    """
    finite = expected.isfinite()
    if not torch.equal(got.isfinite(), finite):  # or the shapes differ
        return torch.inf, 0.0
    got = got.detach()[finite].double()
    expected = expected.detach()[finite].double()
    if got.numel() == 0:
        return None
    off = (got - expected).abs().max().item()
    allowed = tolerance * expected.abs().max().item()
    return (off, allowed) if off > allowed else None


def _model_problems(model: nn.Module, args: Any, keywords: dict[str, Any]) -> list[str]:
    """A message for each setting in which an unswapped copy of the model gives another output."""
    reader = Reader("check", _duplicate(model).train(), **keywords)
    if len(args) == 1:
        call = reader.call(reader.first(args[0]))
    else:
        call = Call(*reader.prepared((tuple(args), keywords)))
    reader.model = model  # frees the copy

    def outputs(copied: nn.Module) -> dict[str, list[Tensor]]:
        by_setting = {}
        for name, training, grad in _SETTINGS:
            with torch.set_grad_enabled(grad):
                leaves = tree_leaves(_call(reader, copied.train(training), call))
            tensors = [x.detach() for x in leaves if isinstance(x, Tensor)]
            by_setting[name] = [x for x in tensors if x.is_floating_point()]
            if not by_setting[name]:
                text = "the model's output for these inputs has no float tensor"
                raise ValueError(f"normplug.check: {text}.")
        return by_setting

    def differences(
        these: dict[str, list[Tensor]], those: dict[str, list[Tensor]]
    ) -> dict[str, tuple[float, float]]:
        pairs = {name: _largest_distance(these[name], those[name]) for name in these}
        return {name: pair for name, pair in pairs.items() if pair is not None}

    # One after another: a second copy may not fit into the memory.
    ours = outputs(_duplicate(model))
    far = differences(ours, outputs(unswap(_duplicate(model))))
    unsteady = differences(outputs(_duplicate(model)), ours) if far else {}
    unsteady = {name: pair for name, pair in unsteady.items() if name in far}
    if unsteady:
        _checks.warn(
            f"normplug.check: in {', '.join(unsteady)}, two calls of {type(model).__name__} with "
            f"this batch differ by {max(unsteady.values())[0]:.3g}, although the generators of "
            "torch, numpy and random have the same seed. So it is not compared with the unswapped "
            "model."
        )
    return [
        f"the whole model: in {name}, its output differs from the unswapped model's by {off:.3g}; "
        f"rounding explains at most {allowed:.1g}. Something reads the norms' weights without "
        "calling their forward."
        for name, (off, allowed) in far.items()
        if name not in unsteady
    ]


def _duplicate(thing: Any) -> Any:
    """A deep copy of a model or a batch, or an error that says how to check without one."""
    try:
        return duplicate(thing)
    except Exception as error:
        what = type(thing).__name__ if isinstance(thing, nn.Module) else "batch"
        text = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"normplug.check: the {what} cannot be copied, which a comparison with the unswapped "
            f"model needs: {text}. Use normplug.check(model), without a batch."
        ) from error


def _call(reader: Reader, model: nn.Module, call: Call) -> Any:
    """Call a model on a copy of its arguments, with the same random numbers each time."""
    with seeded():
        return reader.apply(model, Call(*_duplicate(tuple(call))))


def _largest_distance(
    got: list[Tensor], expected: list[Tensor]
) -> tuple[float, float] | None:
    """The `_distance` of the outputs that differ most; None if rounding explains all."""
    if [x.shape for x in got] != [x.shape for x in expected]:
        return torch.inf, 0.0
    pairs = (
        _distance(x, y, max(16 * torch.finfo(y.dtype).eps, 1e-3))
        for x, y in zip(got, expected, strict=True)
    )
    return max(filter(None, pairs), key=lambda pair: pair[0] - pair[1], default=None)
