"""Checks of what users pass and have installed, and their error messages.

Every message has the same form: the caller, the rule, the value it got, and a way out.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, get_args

import torch
from torch import Tensor, nn

from normplug import _activations, _layouts
from normplug._choices import AutocastOutput, Backend, Statistics

BACKENDS = get_args(Backend)
_CHOICES = {
    "autocast_output": get_args(AutocastOutput),
    "statistics": get_args(Statistics),
}
_LAYOUTS = (torch.strided, torch.jagged)
# The tensors of a call after its input, in order: see `_ops.spec.Tensors`.
_OTHERS = (
    "residual", "weight", "bias", "input_bias", "running_mean", "running_var",
    "num_batches_tracked",
)  # fmt: skip
# Read once: calls take microseconds.
DEFAULT_BACKEND = os.environ.get("NORMPLUG_BACKEND", "auto")


def must(caller: str, name: str, rule: str, got: str, way_out: str = "") -> str:
    """Format an error message; `caller` is a function or a class of normplug."""
    if len(got) > 200:
        got = f"{got[:200]}..."
    text = f"normplug.{caller}: {name} must be {rule}; got {got}."
    return f"{text} {way_out}" if way_out else text


def described(value: Any) -> str:
    """A value and its type."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""


@contextmanager
def needs(
    caller: str, extra: str, raises: type[BaseException] = MissingPackage
) -> Iterator[None]:
    """If an import inside the block fails, name the extra that installs the missing package.

    A missing module of normplug itself is a bug, and its error is raised unchanged. With
    `raises=SystemExit`, a command ends with the message and status 1.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "normplug":
            raise
        message = f'{caller} needs {error.name}: pip install "normplug[{extra}]"'
        missing: Any = raises(message)
        missing.name = error.name
        raise missing from None


def warn(
    text: str, category: type[Warning] = UserWarning, through: tuple[str, ...] = ()
) -> None:
    """Warn, at the line of the user's code that called normplug, also through other packages."""
    frame, level = sys._getframe(1), 2
    # `swapped` is entered through contextlib.
    inside = ("normplug", "contextlib", *through)
    while (
        frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in inside
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def module(caller: str, model: Any) -> None:
    """Reject anything but an `nn.Module`, and compiled TorchScript, whose layers are fixed."""
    if not isinstance(model, nn.Module):
        raise TypeError(must(caller, "model", "an nn.Module", type(model).__name__))
    if isinstance(model, torch.jit.ScriptModule):
        got = f"{type(model).__name__}, compiled TorchScript, whose layers cannot change"
        way_out = "Use the module it was made from."
        raise TypeError(must(caller, "model", "an nn.Module in Python", got, way_out))


def backend(caller: str, name: str) -> str:
    """Reject an unknown backend; return the backend, with "auto" read from `NORMPLUG_BACKEND`."""
    if isinstance(name, str) and name == "auto":
        return _one_of(caller, "NORMPLUG_BACKEND", DEFAULT_BACKEND, BACKENDS)
    return _one_of(caller, "backend", name, BACKENDS)


def option(caller: str, name: str, value: Any) -> None:
    """Reject an unknown value of `backend`, `autocast_output` or `statistics`."""
    if name == "backend":
        backend(caller, value)
    else:
        _one_of(caller, name, value, _CHOICES[name])


def activation(caller: str, chosen: _activations.ActivationLike) -> None:
    """Reject an activation that a norm cannot apply."""
    if isinstance(chosen, tuple):
        name = chosen[0] if len(chosen) == 2 and isinstance(chosen[0], str) else ""
        found = _activations.ACTIVATIONS.get(name)
        if found is None or not found.slope or not _activations.is_slope(chosen[1]):
            rule = "a pair such as ('leaky_relu', 0.2), with a finite slope above 0"
            raise ValueError(must(caller, "activation", rule, repr(chosen)))
    elif chosen is not None:
        _one_of(
            caller, "activation", chosen, [*_activations.ACTIVATIONS], "None or one of"
        )


def _one_of(
    caller: str, name: str, value: str, names: Sequence[Any], rule: str = "one of"
) -> str:
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise ValueError(must(caller, name, f"{rule} {listed}", repr(value)))
    return value


def flags(caller: str, **values: Any) -> None:
    """Reject anything but True and False: values such as "no" and 0.0 are ambiguous."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(must(caller, name, "True or False", described(value)))


def filters(role: str, given: Any) -> list[Any]:
    """Return the filters as a list; reject a filter that cannot select layers."""
    if given is None:
        return []
    several = isinstance(given, (Sequence, Set, Iterator)) and not isinstance(given, str)
    listed = list(given) if several else [given]
    for one in listed:
        if not (isinstance(one, (str, type)) or callable(one)) or isinstance(
            one, nn.Module
        ):
            raise TypeError(
                f"normplug: {role} must be a glob, a 're:' pattern, a class, a callable (path, "
                f"module), or a list of these; got {described(one)}."
            )
    return listed


def swap_options(caller: str, **options: Any) -> None:
    """Reject options of `normplug.swap` that are wrong for every model."""
    for name, value in options.items():
        if name == "backend" or name in _CHOICES:
            option(caller, name, value)
        elif name in ("track_running_stats", "preserve_output") and value is None:
            continue
        elif name not in ("include", "exclude"):
            flags(caller, **{name: value})
        elif not isinstance(value, Iterator):
            # An iterator can only be read once, by the swap.
            filters(name, value)


def path(caller: str, name: str, value: Any) -> None:
    """Reject anything but a path or None."""
    if not isinstance(value, (str, os.PathLike, type(None))):
        raise TypeError(must(caller, name, "a path or None", described(value)))


def number(caller: str, name: str, value: Any) -> None:
    """Reject what torch does not accept as a float; True and False are not numbers here."""
    if not isinstance(value, (float, int, numbers.Real)) or isinstance(
        value, (bool, Fraction)
    ):
        raise TypeError(must(caller, name, "a number", described(value)))


def as_number(value: Any) -> Any:
    """Return the float in a tensor of no dimensions, which torch accepts as a number.

    Return other values unchanged, and tensors that torch refuses (bool, complex, meta, with a
    gradient).
    """
    if (
        not isinstance(value, Tensor)
        or value.dim() > 0
        or value.requires_grad
        or value.is_meta
    ):
        return value
    return value if value.is_complex() or value.dtype == torch.bool else float(value)


def count(caller: str, name: str, value: Any) -> None:
    """Reject anything but an integer of at least 1."""
    whole = (int, torch.SymInt, numbers.Integral)
    if not isinstance(value, whole) or isinstance(value, bool):
        raise TypeError(must(caller, name, "an integer", described(value)))
    if value < 1:
        raise ValueError(must(caller, name, "at least 1", described(value)))


def shape(caller: str, sizes: Sequence[Any]) -> None:
    """Reject a normalized_shape with anything but integers of at least 1."""
    for size in sizes:
        count(caller, "each size in normalized_shape", size)


def layer(caller: str, init: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Reject bad arguments of a torch norm's constructor `init`, before it runs."""
    signature = inspect.signature(init)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:  # the error does not name the class
        raise TypeError(f"normplug.{caller}: {error}.") from None
    for name in ("num_features", "num_groups", "num_channels"):
        if name in given:
            count(caller, name, given[name])
    if "normalized_shape" in given:
        sizes = given["normalized_shape"]
        if isinstance(sizes, Iterable) and not isinstance(sizes, Tensor):
            shape(caller, list(sizes))
        else:
            count(caller, "normalized_shape", sizes)
    # None is the default of an RMSNorm.
    if "eps" in given and given["eps"] is not signature.parameters["eps"].default:
        number(caller, "eps", as_number(given["eps"]))
    if "momentum" in given:
        momentum(caller, as_number(given["momentum"]), None, updates=False)
    switches = ("affine", "elementwise_affine", "track_running_stats")
    flags(caller, **{name: given[name] for name in switches if name in given})


def tensors(caller: str, x: Any, *others: Any) -> None:
    """Reject an input, or another tensor of a call, of a type or dtype that no norm accepts."""
    floating(caller, x)
    for name, t in zip(_OTHERS, others, strict=True):
        if t is None:
            continue
        if name == "num_batches_tracked":
            _tensor(caller, name, t)
        else:
            dense(caller, name, t, or_nested=name == "residual")


def devices(caller: str, x: Tensor, *others: Tensor | None) -> None:
    """Reject tensors on different devices.

    Call it after the route is chosen: with backend="triton", the kernels' own reason comes first.
    """
    for name, t in zip(_OTHERS, others, strict=True):
        if t is not None and t.device != x.device:
            rule = f"on the input's device {x.device}"
            way_out = "Move one of them with .to(device)."
            raise ValueError(must(caller, name, rule, str(t.device), way_out))


def _tensor(caller: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        way_out = "Convert an array or a list with torch.as_tensor."
        raise TypeError(
            must(caller, name, "a torch.Tensor", type(value).__name__, way_out)
        )


def dense(caller: str, name: str, t: Any, or_nested: bool = False) -> None:
    """Reject anything but a dense floating-point tensor; or_nested: accept a nested one, too."""
    floating(caller, t, name)
    if (t.is_nested and not or_nested) or t.layout not in _LAYOUTS:
        kind = "a nested tensor" if t.is_nested else str(t.layout)
        raise TypeError(must(caller, name, "a dense tensor", kind, "Use .to_dense()."))


def floating(caller: str, x: Any, name: str = "input") -> None:
    """Reject anything but a floating-point tensor."""
    _tensor(caller, name, x)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        rule = "float16, bfloat16, float32 or float64"
        way_out = f"Convert it first, e.g. {name}.float()."
        raise TypeError(must(caller, name, rule, str(x.dtype), way_out))


def momentum(
    caller: str, value: float | None, counter: Tensor | None, updates: bool
) -> None:
    """Reject a momentum that is not a number, and a cumulative average without a counter.

    updates: whether there are running statistics to update.
    """
    if value is not None:
        number(caller, "momentum", value)
        if not -math.inf < value < math.inf:  # torch.compile cannot trace `math.isfinite`
            raise ValueError(
                must(caller, "momentum", "None or a finite number", str(value))
            )
    elif updates and counter is None:
        raise ValueError(
            f"normplug.{caller}: momentum=None averages over all batches and needs "
            "num_batches_tracked to count them; got None. Pass a counter or a float momentum."
        )


def channels(caller: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Reject an input without channels, and vectors without exactly one value per channel."""
    if x.is_nested:
        rule, got = "a dense tensor (N, C) or (N, C, *space)", "a nested tensor"
        way_out = "Pad it first, e.g. input.to_padded_tensor(0.0), or use LayerNorm."
        raise ValueError(must(caller, "input", rule, got, way_out))
    if x.dim() < 2:
        got = f"{x.dim()} dimension(s), shape {tuple(x.shape)}"
        raise ValueError(must(caller, "input", "(N, C) or (N, C, *space)", got))
    for name, vector in vectors.items():
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != x.shape[1]):
            rule = f"(C,) = ({x.shape[1]},) for input of shape {tuple(x.shape)}"
            raise ValueError(must(caller, name, rule, str(tuple(vector.shape))))


def one_value(caller: str, what: str) -> ValueError:
    """Return the error for training on one value per channel."""
    return ValueError(
        f"normplug.{caller}: training needs more than one value per channel; {what} has 1. Use "
        ".eval(), a larger batch, or drop_last=True in the loader."
    )


def more_than_one_position(caller: str, x: Tensor) -> None:
    """Reject InstanceNorm of a single spatial position, where every variance is 0."""
    if math.prod(x.shape[2:]) == 1:
        got = f"input of shape {tuple(x.shape)}"
        way_out = "Use a larger input, or normplug.GroupNorm or LayerNorm."
        raise ValueError(
            must(caller, "input", "of more than one spatial position", got, way_out)
        )


def groups(caller: str, x: Tensor, groups: Any) -> None:
    """Reject `groups` that do not divide the channels, and one sample with one value per group."""
    count(caller, "num_groups", groups)
    if x.shape[1] % groups:
        rule = (
            f"a divisor of the {x.shape[1]} channels of input of shape {tuple(x.shape)}"
        )
        raise ValueError(must(caller, "num_groups", rule, str(groups)))
    if x.numel() == groups:
        got = f"shape {tuple(x.shape)} for {groups} groups"
        raise ValueError(must(caller, "input", "larger than one value per group", got))


def running_pair(
    caller: str, mean: Tensor | None, var: Tensor | None, training: bool
) -> None:
    """Reject one running statistic without the other, and evaluation without either."""
    if (mean is None) != (var is None):
        raise ValueError(
            f"normplug.{caller}: running_mean and running_var must be passed together; got "
            f"{'only running_var' if mean is None else 'only running_mean'}."
        )
    if mean is None and not training:
        raise ValueError(
            f"normplug.{caller}: training=False normalises by running_mean and running_var, which "
            "are None. Pass them, or training=True to use the batch's own statistics."
        )


def same_shape(caller: str, x: Tensor, **others: Tensor | None) -> None:
    """Reject a second input that would need broadcasting."""
    for name, other in others.items():
        if other is not None and _sizes(other) != _sizes(x):
            raise ValueError(
                f"normplug.{caller}: {name} must have the input's shape {_sizes(x)}; "
                f"got {_sizes(other)}."
            )


def trailing(
    caller: str, x: Tensor, shape: Sequence[int], **vectors: Tensor | None
) -> None:
    """Reject an input whose shape does not end in `shape`, and vectors of any other shape."""
    shape = tuple(shape)
    if not shape or x.shape[-len(shape) :] != shape:
        rule = f"(*rows, *normalized_shape) with normalized_shape={shape}"
        raise ValueError(must(caller, "input", rule, f"input of shape {tuple(x.shape)}"))
    for name, vector in vectors.items():
        if vector is not None and vector.shape != shape:
            rule = f"of shape normalized_shape = {shape}"
            raise ValueError(must(caller, name, rule, str(tuple(vector.shape))))


def beside(caller: str, x: Tensor, **others: Tensor | None) -> None:
    """Reject a gate, a scale or a shift that no norm accepts with this input."""
    for name, other in others.items():
        if other is None:
            continue
        dense(caller, name, other)
        if x.is_nested:
            rule = f"a dense tensor if there is a {name}"
            raise ValueError(must(caller, "input", rule, "a nested tensor"))
        if other.device != x.device:
            rule = f"on the input's device {x.device}"
            way_out = "Move one of them with .to(device)."
            raise ValueError(must(caller, name, rule, str(other.device), way_out))


def modulation(
    caller: str, x: Tensor, shape: Sequence[int], scale: Any, shift: Any
) -> None:
    """Reject a scale or a shift that is neither per sample nor per token."""
    beside(caller, x, scale=scale, shift=shift)
    if scale is not None and shift is not None and scale.shape != shift.shape:
        rule = f"of the scale's shape {tuple(scale.shape)}"
        raise ValueError(must(caller, "shift", rule, str(tuple(shift.shape))))
    rows = len(shape)
    name, one = ("shift", shift) if scale is None else ("scale", scale)
    whole = _layouts.spread(one.shape, x.dim(), rows)
    pairs = zip(whole, x.shape, strict=False)
    fits = len(whole) == x.dim() and all(size in (1, full) for size, full in pairs)
    if not fits or one.shape[one.dim() - rows :] != tuple(shape):
        row = ", ".join(map(str, shape))
        rule = f"(B, {row}), (B, 1, {row}) or of the input's shape {tuple(x.shape)}"
        raise ValueError(must(caller, name, rule, str(tuple(one.shape))))


def group_size(caller: str, size: Any, shape: Sequence[int]) -> None:
    """Reject a group size that does not divide the row."""
    count(caller, "group_size", size)
    if len(shape) != 1 or shape[0] % size:
        rule = f"a divisor of the one size in normalized_shape={tuple(shape)}"
        raise ValueError(must(caller, "group_size", rule, str(size)))


def _sizes(x: Tensor) -> tuple[Any, ...]:
    """The shape of x, or its components' shapes for a strided nested tensor, which has none."""
    if x.is_nested and x.layout == torch.strided:
        return tuple(tuple(part.shape) for part in x.unbind())
    return tuple(x.shape)


def scalars(caller: str, **values: Tensor | None) -> None:
    """Reject running statistics with more than one value."""
    for name, value in values.items():
        if value is not None and value.numel() != 1:
            raise ValueError(
                must(caller, name, "a scalar tensor", f"shape {tuple(value.shape)}")
            )
