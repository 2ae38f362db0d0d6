"""What a user can get wrong in a call.

Each sentence has one form: the caller, what must be (the rule), what was got, and the way out.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from normplug import _activations

ACTIVATIONS = (None, *_activations.ACTIVATIONS)
AUTOCAST_OUTPUTS = ("low", "float32")
BACKENDS = ("auto", "triton", "torch")
DEFAULT_BACKEND = os.environ.get("NORMPLUG_BACKEND", "auto")  # once: a call costs microseconds


def _must(caller: str, name: str, rule: str, got: str, way_out: str = "") -> str:
    """The sentence of almost every error; `caller` is a function or a class of normplug."""
    return f"normplug.{caller}: {name} must be {rule}; got {got}.{way_out and f' {way_out}'}"


def module(caller: str, model: Any) -> None:
    """Refuse what is no module, and compiled TorchScript, which has no layers left."""
    if not isinstance(model, nn.Module):
        raise TypeError(_must(caller, "model", "an nn.Module", type(model).__name__))
    if isinstance(model, torch.jit.ScriptModule):
        got = f"{type(model).__name__}, compiled TorchScript, whose layers cannot change"
        way_out = "Use the module it was made from."
        raise TypeError(_must(caller, "model", "an nn.Module in Python", got, way_out))


def backend(caller: str, name: str) -> str:
    """Refuse an unknown backend; return the backend, or what `NORMPLUG_BACKEND` sets for "auto"."""
    if isinstance(name, str) and name == "auto":
        return _one_of(caller, "NORMPLUG_BACKEND", DEFAULT_BACKEND, BACKENDS)
    return _one_of(caller, "backend", name, BACKENDS)


def autocast_output(caller: str, name: str) -> None:
    """Refuse what is not one of the two rules for the output's dtype under autocast."""
    _one_of(caller, "autocast_output", name, AUTOCAST_OUTPUTS)


def activation(caller: str, chosen: _activations.ActivationLike) -> None:
    """Refuse an activation that is not fused."""
    if isinstance(chosen, tuple):
        name = chosen[0] if len(chosen) == 2 and isinstance(chosen[0], str) else ""
        known = _activations.ACTIVATIONS.get(name)
        if known is None or not known.slope or not _activations.is_slope(chosen[1]):
            rule = "a pair such as ('leaky_relu', 0.2), with a finite slope above 0"
            raise ValueError(_must(caller, "activation", rule, repr(chosen)))
    elif chosen is not None:
        _one_of(caller, "activation", chosen, ACTIVATIONS[1:], "None or one of")


def _one_of(caller: str, name: str, value: str, known: Sequence[Any], rule: str = "one of") -> str:
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(map(repr, known))
        raise ValueError(_must(caller, name, f"{rule} {listed}", repr(value)))
    return value


def no_kernel(caller: str, why: str) -> NotImplementedError:
    """The error of a call that asks for the kernels where they cannot run."""
    return NotImplementedError(
        f"normplug.{caller}: backend='triton', but {why}. Use backend='auto' or 'torch'."
    )


def flags(caller: str, **values: Any) -> None:
    """Refuse anything but True and False, since "no" and 0.0 can be read in two ways."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(_must(caller, name, "True or False", _shown(value)))


def filters(role: str, given: Any) -> list[Any]:
    """Refuse what cannot pick layers; return a list of filters."""
    if given is None:
        return []
    several = isinstance(given, (Sequence, Set, Iterator)) and not isinstance(given, str)
    listed = list(given) if several else [given]
    for one in listed:
        if not (isinstance(one, (str, type)) or callable(one)) or isinstance(one, nn.Module):
            raise TypeError(
                f"normplug: {role} must be a glob, a 're:' pattern, a class, a callable (path, "
                f"module), or a list of these; got {_shown(one)}."
            )
    return listed


def swap_options(caller: str, **options: Any) -> None:
    """Refuse options of `normplug.swap` that are wrong for every model."""
    for name, value in options.items():
        if name == "autocast_output":
            autocast_output(caller, value)
        elif name == "backend":
            backend(caller, value)
        elif name == "track_running_stats" and value is None:
            continue
        elif name not in ("include", "exclude"):
            flags(caller, **{name: value})
        elif not isinstance(value, Iterator):  # it can only be read once
            filters(name, value)


def path(caller: str, name: str, value: Any) -> None:
    """Refuse what is neither None nor a path."""
    if not isinstance(value, (str, os.PathLike, type(None))):
        raise TypeError(_must(caller, name, "a path or None", _shown(value)))


def number(caller: str, name: str, value: Any) -> None:
    """Refuse what is no real number, and True and False."""
    if not isinstance(value, (float, int, numbers.Real)) or isinstance(value, bool):
        raise TypeError(_must(caller, name, "a number", _shown(value)))


def eps(caller: str, value: Any, zero: bool = False, none: bool = False) -> None:
    """Refuse an eps that does not keep the root above 0.

    zero: allow 0, as torch's LayerNorm. none: allow None, as torch's RMSNorm.
    """
    if none and value is None:
        return
    number(caller, "eps", value)
    if not (0 < value < math.inf or (zero and value == 0)):
        rule = "0 or a finite number above" if zero else "a finite number above 0"
        way_out = f"Torch's is {None if none else '1e-5'}."
        raise ValueError(_must(caller, "eps", rule, str(value), way_out))


def count(caller: str, name: str, value: Any) -> None:
    """Refuse what is no whole number of at least 1."""
    whole = (int, torch.SymInt, numbers.Integral)
    if not isinstance(value, whole) or isinstance(value, bool):
        raise TypeError(_must(caller, name, "an integer", _shown(value)))
    if value < 1:
        raise ValueError(_must(caller, name, "at least 1", str(value)))


def shape(caller: str, sizes: Sequence[Any]) -> None:
    """Refuse a normalized_shape of other than whole numbers of at least 1."""
    for size in sizes:
        count(caller, "each size in normalized_shape", size)


def layer(caller: str, init: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Refuse arguments of a torch norm's constructor `init`, before it reads them."""
    signature = inspect.signature(init)
    given = signature.bind(*args, **kwargs).arguments
    for name in ("num_features", "num_groups", "num_channels"):
        if name in given:
            count(caller, name, given[name])
    if "normalized_shape" in given:
        sizes = given["normalized_shape"]
        if isinstance(sizes, Iterable) and not isinstance(sizes, Tensor):
            shape(caller, list(sizes))
        else:
            count(caller, "normalized_shape", sizes)
    if "eps" in given:
        none = signature.parameters["eps"].default is None
        eps(caller, given["eps"], zero="num_features" not in given, none=none)
    if "momentum" in given:
        momentum(caller, given["momentum"], None, moves=False)
    switches = ("affine", "elementwise_affine", "track_running_stats")
    flags(caller, **{name: given[name] for name in switches if name in given})


def no_shape(caller: str, given: Any) -> TypeError:
    """The error of a normalized_shape that is no sequence."""
    rule = "a sequence of integers, e.g. input.shape[-1:]"
    return TypeError(_must(caller, "normalized_shape", rule, _shown(given)))


def tensors(caller: str, x: Any, **others: Any) -> None:
    """Refuse an input or other arguments (which may be None) that no norm computes with."""
    floating(caller, x)
    for name, t in others.items():
        if t is None:
            continue
        if name == "num_batches_tracked":
            _tensor(caller, name, t)
        else:
            floating(caller, t, name)


def devices(caller: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors on several devices; after the kernels, which have a reason of their own."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            rule = f"on the input's device {x.device}"
            way_out = "Move one of them with .to(device)."
            raise ValueError(_must(caller, name, rule, str(t.device), way_out))


def _tensor(caller: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        way_out = "torch.as_tensor makes one of an array or a list."
        raise TypeError(_must(caller, name, "a torch.Tensor", type(value).__name__, way_out))


def floating(caller: str, x: Any, name: str = "input") -> None:
    """Refuse what cannot be normalised: no tensor, integers, booleans, complex numbers."""
    _tensor(caller, name, x)
    if not x.is_floating_point():
        rule = "float16, bfloat16, float32 or float64"
        way_out = f"Convert it first, e.g. {name}.float()."
        raise TypeError(_must(caller, name, rule, str(x.dtype), way_out))


def momentum(caller: str, value: float | None, counter: Tensor | None, moves: bool = True) -> None:
    """Refuse a momentum that is no number, and a cumulative average without a counter.

    moves: whether there are running statistics to move.
    """
    if value is not None:
        number(caller, "momentum", value)
        if not math.isfinite(value):
            raise ValueError(_must(caller, "momentum", "None or a finite number", str(value)))
    elif moves and counter is None:
        raise ValueError(
            f"normplug.{caller}: momentum=None averages over all batches and needs "
            "num_batches_tracked to count them; got None. Pass a counter or a float momentum."
        )


def channels(caller: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Refuse an input without a channel dimension, and vectors that are not one value a channel."""
    if x.is_nested:
        rule, got = "a dense tensor (N, C) or (N, C, *space)", "a nested tensor"
        way_out = "Pad it first, e.g. input.to_padded_tensor(0.0), or use LayerNorm."
        raise ValueError(_must(caller, "input", rule, got, way_out))
    if x.dim() < 2:
        got = f"{x.dim()} dimension(s), shape {tuple(x.shape)}"
        raise ValueError(_must(caller, "input", "(N, C) or (N, C, *space)", got))
    for name, vector in vectors.items():
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != x.shape[1]):
            rule = f"(C,) = ({x.shape[1]},) for input of shape {tuple(x.shape)}"
            raise ValueError(_must(caller, name, rule, str(tuple(vector.shape))))


def more_than_one_value(caller: str, x: Tensor) -> None:
    """Refuse to train on one value a channel, whose variance is always 0."""
    if x.numel() == x.shape[1] != 0:
        raise ValueError(
            f"normplug.{caller}: training needs more than one value per channel; input of shape "
            f"{tuple(x.shape)} has 1. Use .eval(), a larger batch, or drop_last=True in the loader."
        )


def more_than_one_position(caller: str, x: Tensor) -> None:
    """Refuse an InstanceNorm of one value a channel and sample, whose variance is always 0."""
    if math.prod(x.shape[2:]) == 1:
        got = f"input of shape {tuple(x.shape)}"
        way_out = "Use a larger input, or normplug.GroupNorm or LayerNorm."
        raise ValueError(_must(caller, "input", "of more than one spatial position", got, way_out))


def groups(caller: str, x: Tensor, groups: Any) -> None:
    """Refuse groups that the channels do not make, and a single group of a single value."""
    count(caller, "num_groups", groups)
    if x.shape[1] % groups:
        rule = f"a divisor of the {x.shape[1]} channels of input of shape {tuple(x.shape)}"
        raise ValueError(_must(caller, "num_groups", rule, str(groups)))
    if x.numel() == groups:
        rule = f"of more than one value for {groups} groups"
        raise ValueError(_must(caller, "input", rule, f"shape {tuple(x.shape)}"))


def one_joined_value(processes: int) -> ValueError:
    """The error of training on one value a channel in the joined batch of several processes."""
    return ValueError(
        "normplug.SyncBatchNorm: training needs more than one value per channel; the joined batch "
        f"of {processes} processes has 1. Use .eval(), a larger batch, or drop_last=True in the "
        "loader."
    )


def running_pair(caller: str, mean: Tensor | None, var: Tensor | None, training: bool) -> None:
    """Refuse one running statistic without the other, and evaluation without either."""
    if (mean is None) != (var is None):
        raise ValueError(
            f"normplug.{caller}: running_mean and running_var go together; got "
            f"{'only running_var' if mean is None else 'only running_mean'}."
        )
    if mean is None and not training:
        raise ValueError(
            f"normplug.{caller}: training=False normalises by running_mean and running_var, which "
            "are None. Pass them, or training=True to use the batch's own statistics."
        )


def same_shape(caller: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse a second input that would broadcast."""
    for name, other in others.items():
        if other is not None and _sizes(other) != _sizes(x):
            raise ValueError(
                f"normplug.{caller}: {name} must have the input's shape {_sizes(x)}; "
                f"got {_sizes(other)}."
            )


def trailing(caller: str, x: Tensor, shape: Sequence[int], **vectors: Tensor | None) -> None:
    """Refuse an input that does not end in `shape`, and vectors that are not exactly `shape`."""
    shape = tuple(shape)
    if not shape or x.shape[-len(shape) :] != shape:
        rule = f"(*rows, *normalized_shape) with normalized_shape={shape}"
        raise ValueError(_must(caller, "input", rule, f"input of shape {tuple(x.shape)}"))
    for name, vector in vectors.items():
        if vector is not None and vector.shape != shape:
            rule = f"of shape normalized_shape = {shape}"
            raise ValueError(_must(caller, name, rule, str(tuple(vector.shape))))


def _sizes(x: Tensor) -> tuple[Any, ...]:
    """The shape of x; of a nested tensor that has none, its components' shapes."""
    if x.is_nested and x.layout == torch.strided:
        return tuple(tuple(part.shape) for part in x.unbind())
    return tuple(x.shape)


def not_replicated(caller: str, name: str, placements: Any) -> ValueError:
    """The error of a running statistic of which each process has a part only."""
    way_out = "Use redistribute(placements=[Replicate()])."
    return ValueError(_must(caller, name, "replicated", f"a DTensor {placements}", way_out))


def scalars(caller: str, **values: Tensor | None) -> None:
    """Refuse running statistics that are more than one value."""
    for name, value in values.items():
        if value is not None and value.numel() != 1:
            raise ValueError(_must(caller, name, "a scalar tensor", f"shape {tuple(value.shape)}"))


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
