"""Swap one model in every way, and compare it with the stock model that it must equal."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normplug import _convert, plan, swap, target_variance, unswap

SEED = 0
GOLDEN = math.sqrt(target_variance("golden"))
# Some tensors are pure rounding error, such as the gradient of a bias that the next norm cancels.
# So the scale of a tensor is at least this fraction of the largest tensor of its kind.
NOISE = 1e-3
NUDGE = 1e-15  # relative change of a parameter: about four roundings in float64, none in float32

Inputs: TypeAlias = Mapping[str, Any]
# "output in training/0" -> its value
Observed: TypeAlias = dict[str, Tensor]


class Architecture(NamedTuple):
    """An entry of a library's list, and a row of the table.

    Attributes:
        library: its package.
        name: its name in that package.
        build: builds it with random weights, under `torch.device("meta")` too.
        inputs: makes the arguments of its forward, by name; tensors are on the CPU.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]


@dataclass
class Report:
    """What the check of a model found.

    Attributes:
        taken: class of norm -> how many `swap` takes.
        left: class of norm and reason -> how many it leaves.
        error: the largest relative difference between the golden model and the stock model with
            folded weights, and between unswapped and swapped.
        failures: what is wrong, one sentence each.
        unsteady: how the stock model differs from itself in a second run with differently rounded
            parameters; then nothing is compared.
        digest: a hash of every bit of the golden model's values, to compare two runs.
    """

    taken: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    failures: list[str] = field(default_factory=list)
    unsteady: str = ""
    digest: str = ""


def check(model: nn.Module, inputs: Inputs) -> Report:
    """Compare standard, golden, unswapped and unfolded models with the stock one.

    It compares outputs in evaluation and training, gradients of all parameters and running
    statistics after the training step; after `unswap` also classes, attributes and `state_dict`
    keys. Each forward starts from the same seed, so that dropout draws the same.

    Args:
        model: its constant parameters and running statistics are randomised in place, so that no 0
            hides a factor; otherwise it is left as it is.
        inputs: arguments of its forward.
    """
    planned = plan(model)
    report = Report(
        taken=dict(Counter(row.kind for row in planned if row.becomes)),
        left=dict(
            Counter(f"{row.kind} ({row.note})" for row in planned if not row.becomes)
        ),
    )
    if not report.taken:
        return report
    randomise(model)
    taken = [row.path for row in planned if row.becomes]
    tolerance = _tolerance(model)

    stock = observe(copy.deepcopy(model), inputs)
    errors = compare(observe(_swapped(model, "standard"), inputs), stock)
    if max(errors.values()) > 0:
        spread = compare(observe(_nudged(model), inputs), stock)
        worst = max(spread, key=lambda key: spread[key])
        if spread[worst] > tolerance:
            said = (
                f"the stock model differs from itself in {worst} by {spread[worst]:.1e}"
            )
            return Report(report.taken, report.left, unsteady=said)
        tolerance = max(tolerance, 16 * spread[worst])
    _record("standard is not the stock model", errors, tolerance, report)

    folded = observe(fold(copy.deepcopy(model), taken), inputs)
    if max(compare(folded, stock).values()) < 1e3 * tolerance:
        report.failures.append(
            "golden is the same function as standard: nothing is compared"
        )
    del stock
    for key in _weights(model, taken) & folded.keys():
        folded[key] = folded[key] * GOLDEN  # the chain rule
    golden = _swapped(model, "golden")
    observed = observe(golden, inputs)
    report.error = _record(
        "golden is not the folded stock model",
        compare(observed, folded),
        tolerance,
        report,
    )
    report.digest = digest(observed)
    del folded, observed

    # Training updates the running statistics: both evaluations run between the two training passes.
    before = train(golden, inputs) | evaluate(golden, inputs)
    unswap(golden)
    after = evaluate(golden, inputs) | train(golden, inputs)
    error = _record(
        "unswapped is not the swapped model", compare(after, before), tolerance, report
    )
    report.error = max(report.error, error)
    report.failures += differences(golden, model, affine=True)
    del golden
    unfolded = unswap(_swapped(model, "golden"), fold=False)
    report.failures += differences(unfolded, model, affine=False)
    return report


def _tolerance(model: nn.Module) -> float:
    """The largest relative difference of a sound model.

    On the CPU both sides run the same operators. On a GPU torch sums in another order than our
    kernels, and parts of a float64 model compute in float32.
    """
    first = next(p for p in model.parameters() if p.is_floating_point())
    return 64 * torch.finfo(torch.float32 if first.is_cuda else first.dtype).eps


def _swapped(model: nn.Module, mode: str) -> nn.Module:
    return swap(copy.deepcopy(model), mode)


def _nudged(model: nn.Module) -> nn.Module:
    """A copy with differently rounded parameters, to see how far rounding alone moves results."""
    generator = torch.Generator().manual_seed(SEED)
    nudged = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in nudged.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
                parameter.mul_(1 + NUDGE * noise.to(parameter.device))
    return nudged


def randomise(model: nn.Module) -> None:
    """Add noise to constant parameters (norms, layer scales, biases) and to running statistics."""
    generator = torch.Generator().manual_seed(SEED)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor)

    with torch.no_grad():
        for parameter in model.parameters():
            if not (parameter.is_floating_point() and parameter.numel()):
                continue
            if parameter.min() == parameter.max():
                parameter.add_(
                    noise(parameter), alpha=0.2 if parameter.dim() < 2 else 0.02
                )
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer += 0.1 * noise(buffer)
            elif name.endswith("running_var"):
                buffer *= (0.2 * noise(buffer)).exp()


def fold(model: nn.Module, paths: list[str]) -> nn.Module:
    """Multiply the effective norm weights at `paths` by sqrt(tv); golden must equal the result."""
    done: set[int] = set()
    for path in paths:
        module = model.get_submodule(path)
        if module.weight is None:
            module.weight = _constant_weight(module, next(model.parameters()))
        elif id(module.weight) not in done:
            done.add(id(module.weight))
            with torch.no_grad():
                offset = _convert.declared(module)._weight_offset
                module.weight.copy_((module.weight + offset) * GOLDEN - offset)  # type: ignore[operator]
    return model


def _constant_weight(module: nn.Module, like: Tensor) -> nn.Parameter:
    """A weight of GOLDEN, of the dtype and on the device of `like`."""
    names = ("normalized_shape", "num_features", "num_channels", "dim")
    shape = next(getattr(module, name) for name in names if hasattr(module, name))
    shape = shape if isinstance(shape, tuple) else (shape,)
    weight = torch.full(shape, GOLDEN, dtype=like.dtype, device=like.device)  # type: ignore[arg-type]
    return nn.Parameter(weight, requires_grad=False)


def _weights(model: nn.Module, paths: list[str]) -> set[str]:
    """The keys of the gradients of the norms' weights; a shared weight has only its first name."""
    norms = {id(model.get_submodule(path).weight) for path in paths}
    return {f"gradient/{name}" for name, p in model.named_parameters() if id(p) in norms}


def observe(model: nn.Module, inputs: Inputs) -> Observed:
    """Outputs in evaluation and training, gradients, and buffers after the training step."""
    seen = evaluate(model, inputs)
    outputs = train(model, inputs)
    _loss(outputs).backward()
    seen |= {key: value.detach() for key, value in outputs.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            seen[f"gradient/{name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        if not name.endswith("weight"):  # of a frozen norm, which folding scales
            seen[f"statistic/{name}"] = buffer.detach().clone()
    return seen


def evaluate(model: nn.Module, inputs: Inputs) -> Observed:
    """Outputs in evaluation, under no_grad."""
    with torch.no_grad():
        return _flat("output in evaluation", _call(model.eval(), inputs))


def train(model: nn.Module, inputs: Inputs) -> Observed:
    """Outputs in training."""
    return _flat("output in training", _call(model.train(), inputs))


def _call(model: nn.Module, inputs: Inputs) -> Any:
    torch.manual_seed(SEED)
    return model(**pytree.tree_map_only(Tensor, torch.clone, dict(inputs)))


def _flat(name: str, result: Any) -> Observed:
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return {f"{name}/{i}": leaf for i, leaf in enumerate(leaves)}


def _loss(outputs: Observed) -> Tensor:
    """A sum of weighted means: the gradient of plain means would vanish behind a norm."""
    total = torch.zeros(())
    for y in outputs.values():
        if y.is_floating_point() and y.requires_grad:
            weight = torch.arange(y.numel(), device=y.device).to(y.dtype).cos()
            total = total.to(y) + (y.flatten() * weight).mean()
    return total


def digest(seen: Observed) -> str:
    """A hash of all values, bit for bit."""
    hashed = hashlib.sha256()
    for key in sorted(seen):
        hashed.update(key.encode())
        hashed.update(seen[key].detach().cpu().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


def compare(ours: Observed, theirs: Observed) -> dict[str, float]:
    """The relative difference of each of `theirs`; inf if a value is missing or not finite."""
    own = {key: _largest(value) for key, value in theirs.items()}
    largest: dict[str, float] = {}
    for key, value in own.items():
        kind = key.partition("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), value)
    errors = {}
    for key, value in theirs.items():
        scale = max(own[key], NOISE * largest[key.partition("/")[0]])
        errors[key] = _difference(ours.get(key), value, scale)
    return errors


def _difference(ours: Tensor | None, theirs: Tensor, scale: float) -> float:
    if ours is None or ours.shape != theirs.shape:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    error = _largest(ours.to(torch.float64) - theirs)
    return error / scale if math.isfinite(error) and scale else math.inf


def _largest(tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    return (
        float(torch.linalg.vector_norm(tensor.detach(), math.inf))
        if tensor.numel()
        else 0.0
    )


def _record(
    what: str, errors: dict[str, float], tolerance: float, report: Report
) -> float:
    """Return the largest error; add a failure to the report if it is above `tolerance`."""
    worst = max(errors, key=lambda key: errors[key])
    if errors[worst] > tolerance:
        count = sum(error > tolerance for error in errors.values())
        report.failures.append(
            f"{what}: {count} of {len(errors)} values differ, {worst} by {errors[worst]:.1e}"
        )
    return errors[worst]


def differences(ours: nn.Module, stock: nn.Module, *, affine: bool) -> list[str]:
    """Where an unswapped model differs from the stock one in classes, attributes, keys, values.

    With `affine`, the norms' weights and running statistics may differ.
    """
    found = []
    was = dict(stock.named_modules())
    # A weight of None may have been a plain attribute.
    weights = {"weight"} if affine else set()
    for path, module in ours.named_modules():
        if type(module) is not type(was[path]):
            names = (
                f"{type(module).__name__} after unswap, was {type(was[path]).__name__}"
            )
            found.append(f"{path} is {names}")
        elif (vars(module).keys() ^ vars(was[path]).keys()) - weights:
            found.append(f"{path} has other attributes after unswap")
    a, b = ours.state_dict(), stock.state_dict()
    extra = a.keys() ^ b.keys()
    if affine:
        extra = {key for key in extra if not key.endswith("weight")}
    if extra:
        found.append(
            f"state_dict has other keys after unswap: {', '.join(sorted(extra)[:3])}"
        )
    if not affine and not all(torch.equal(a[key], b[key]) for key in a.keys() & b.keys()):
        found.append("unswap(fold=False) does not give the weights back bit for bit")
    return found
