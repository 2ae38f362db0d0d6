"""What a user can get wrong in a call, each with a sentence that says the rule and the way out."""

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


def module(who: str, model: Any) -> None:
    """Refuse what is no module, and what is compiled TorchScript and has no layers left."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"normplug.{who}: model must be an nn.Module; got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"normplug.{who}: model must be an nn.Module in Python; got {type(model).__name__}, "
            "compiled TorchScript, whose layers cannot change. Use the module it was made from."
        )


def backend(who: str, name: str) -> str:
    """Refuse a backend that is unknown; return what it stands for (`NORMPLUG_BACKEND`, if set)."""
    source, known = "backend", isinstance(name, str)
    if known and name == "auto":
        source, name = "NORMPLUG_BACKEND", DEFAULT_BACKEND
    if not known or name not in BACKENDS:
        raise ValueError(
            f"normplug.{who}: {source} must be one of {_quoted(BACKENDS)}; got {name!r}."
        )
    return name


def no_kernel(who: str, why: str) -> NotImplementedError:
    """The error of a call that asks for the kernels where they cannot run."""
    return NotImplementedError(
        f"normplug.{who}: backend='triton', but {why}. Use backend='auto' or 'torch'."
    )


def autocast_output(who: str, name: str) -> None:
    """Refuse what is not one of the two rules for the output's dtype under autocast."""
    if not isinstance(name, str) or name not in AUTOCAST_OUTPUTS:
        raise ValueError(
            f"normplug.{who}: autocast_output must be one of {_quoted(AUTOCAST_OUTPUTS)}; "
            f"got {name!r}."
        )


def activation(who: str, name: str | None) -> None:
    """Refuse an activation that is not fused."""
    if not isinstance(name, (str, type(None))) or name not in ACTIVATIONS:
        raise ValueError(
            f"normplug.{who}: activation must be None or one of "
            f"{_quoted(list(_activations.ACTIVATIONS))}; got {name!r}."
        )


def flags(who: str, **values: Any) -> None:
    """Refuse anything but True and False, since "no" and 0.0 are read in two ways."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"normplug.{who}: {name} must be True or False; got {_shown(value)}.")


def filters(role: str, given: Any) -> list[Any]:
    """Refuse what picks no layers; return a list of filters."""
    if given is None:
        return []
    several = isinstance(given, (Sequence, Set, Iterator)) and not isinstance(given, str)
    listed = list(given) if several else [given]
    for one in listed:
        if not (isinstance(one, (str, type)) or callable(one)) or isinstance(one, nn.Module):
            raise TypeError(
                f"normplug: {role} takes a glob, a 're:' pattern, a class, a callable (path, "
                f"module), or a list of these; got {_shown(one)}."
            )
    return listed


def swap_options(who: str, **options: Any) -> None:
    """Refuse options of `normplug.swap` that are wrong for every model."""
    for name, value in options.items():
        if name == "autocast_output":
            autocast_output(who, value)
        elif name == "backend":
            backend(who, value)
        elif name not in ("include", "exclude"):
            flags(who, **{name: value})
        elif not isinstance(value, Iterator):  # which can be read once
            filters(name, value)


def known(who: str, options: Iterable[str], names: Sequence[str]) -> None:
    """Refuse options that are not among `names`: typos, most likely."""
    for option in options:
        if option not in names:
            raise TypeError(
                f"normplug.{who}: unknown option {option!r}; the options are {', '.join(names)}."
            )


def path(who: str, name: str, value: Any) -> None:
    """Refuse what is neither None nor a path."""
    if not isinstance(value, (str, os.PathLike, type(None))):
        raise TypeError(f"normplug.{who}: {name} must be a path or None; got {_shown(value)}.")


def number(who: str, name: str, value: Any) -> None:
    """Refuse what is no real number, and True and False."""
    if not isinstance(value, (float, int, numbers.Real)) or isinstance(value, bool):
        raise TypeError(f"normplug.{who}: {name} must be a number; got {_shown(value)}.")


def eps(who: str, value: Any, zero: bool = False) -> None:
    """Refuse an eps that does not keep the root above 0. zero: allow 0, as torch's LayerNorm."""
    number(who, "eps", value)
    if not (0 < value < math.inf or (zero and value == 0)):
        rule = "0 or a finite number above" if zero else "a finite number above 0"
        raise ValueError(f"normplug.{who}: eps must be {rule}; got {value}. Torch's is 1e-5.")


def count(who: str, name: str, value: Any) -> None:
    """Refuse what is no whole number of at least 1."""
    whole = (int, torch.SymInt, numbers.Integral)
    if not isinstance(value, whole) or isinstance(value, bool):
        raise TypeError(f"normplug.{who}: {name} must be an integer; got {_shown(value)}.")
    if value < 1:
        raise ValueError(f"normplug.{who}: {name} must be at least 1; got {value}.")


def shape(who: str, sizes: Sequence[Any]) -> None:
    """Refuse a normalized_shape of other than whole numbers of at least 1."""
    for size in sizes:
        count(who, "each size in normalized_shape", size)


def layer(who: str, init: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Refuse arguments of a torch norm's constructor `init`, before it reads them."""
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    if "num_features" in given:
        count(who, "num_features", given["num_features"])
    if "normalized_shape" in given:
        layer_shape(who, given["normalized_shape"])
    if "eps" in given:
        eps(who, given["eps"], zero="normalized_shape" in given)
    if "momentum" in given:
        momentum(who, given["momentum"], None, moves=False)
    switches = ("affine", "elementwise_affine", "track_running_stats")
    flags(who, **{name: given[name] for name in switches if name in given})


def layer_shape(who: str, given: Any) -> None:
    """Refuse a normalized_shape that is neither a whole number nor a sequence of some."""
    if isinstance(given, Iterable) and not isinstance(given, Tensor):
        shape(who, list(given))
    else:
        count(who, "normalized_shape", given)


def no_shape(who: str, given: Any) -> TypeError:
    """The error of a normalized_shape that is no sequence."""
    return TypeError(
        f"normplug.{who}: normalized_shape must be a sequence of integers, e.g. "
        f"input.shape[-1:]; got {_shown(given)}."
    )


def tensors(who: str, x: Any, **others: Any) -> None:
    """Refuse what is no tensor, and what no norm computes with.

    Args:
        who: the function.
        x: its input.
        **others: its other tensors, or None.
    """
    floating(who, x)
    for name, t in others.items():
        if t is None:
            continue
        _tensor(who, name, t)
        if name != "num_batches_tracked":
            _floating(who, name, t)


def devices(who: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors on several devices; after the kernels, which have a reason of their own."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            raise ValueError(
                f"normplug.{who}: {name} must be on the input's device {x.device}; "
                f"got {t.device}. Move one of them with .to(device)."
            )


def _tensor(who: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"normplug.{who}: {name} must be a torch.Tensor; got {type(value).__name__}. "
            "torch.as_tensor makes one of an array or a list."
        )


def _floating(who: str, name: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(
            f"normplug.{who}: {name} must be float16, bfloat16, float32 or float64; "
            f"got {value.dtype}. Convert it first, e.g. {name}.float()."
        )


def floating(who: str, x: Any) -> None:
    """Refuse what cannot be normalised: no tensor, integers, booleans, complex numbers."""
    _tensor(who, "input", x)
    _floating(who, "input", x)


def momentum(who: str, value: float | None, counter: Tensor | None, moves: bool = True) -> None:
    """Refuse a momentum that is no number, and a cumulative average that has no counter.

    Args:
        who: the function.
        value: the momentum.
        counter: num_batches_tracked, or None.
        moves: whether running statistics are there to be moved.
    """
    if value is not None:
        number(who, "momentum", value)
        if not math.isfinite(value):
            raise ValueError(
                f"normplug.{who}: momentum must be None or a finite number; got {value}."
            )
    elif moves and counter is None:
        raise ValueError(
            f"normplug.{who}: momentum=None averages over all batches and needs "
            "num_batches_tracked to count them; got None. Pass a counter or a float momentum."
        )


def channels(who: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Refuse an input without a channel dimension, and vectors that are not one value a channel."""
    if x.is_nested:
        raise ValueError(
            f"normplug.{who}: input must be a dense tensor (N, C) or (N, C, *space); got a nested "
            "tensor. Pad it first, e.g. input.to_padded_tensor(0.0), or use LayerNorm."
        )
    if x.dim() < 2:
        raise ValueError(
            f"normplug.{who}: input must be (N, C) or (N, C, *space); "
            f"got {x.dim()} dimension(s), shape {tuple(x.shape)}."
        )
    for name, vector in vectors.items():
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != x.shape[1]):
            raise ValueError(
                f"normplug.{who}: {name} must be (C,) = ({x.shape[1]},) for input of shape "
                f"{tuple(x.shape)}; got {tuple(vector.shape)}."
            )


def more_than_one_value(who: str, x: Tensor) -> None:
    """Refuse to train on one value a channel, whose variance is 0 whatever it is."""
    if x.numel() == x.shape[1] != 0:
        raise ValueError(
            f"normplug.{who}: training needs more than one value per channel; input of shape "
            f"{tuple(x.shape)} has 1. Use .eval(), a larger batch, or drop_last=True in the loader."
        )


def running_pair(who: str, mean: Tensor | None, var: Tensor | None, training: bool) -> None:
    """Refuse one running statistic without the other, and evaluation without either."""
    if (mean is None) != (var is None):
        raise ValueError(
            f"normplug.{who}: running_mean and running_var go together; got "
            f"{'only running_var' if mean is None else 'only running_mean'}."
        )
    if mean is None and not training:
        raise ValueError(
            f"normplug.{who}: training=False normalises by running_mean and running_var, which are "
            "None. Pass them, or training=True to use the batch's own statistics."
        )


def same_shape(who: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse a second input that would broadcast."""
    for name, other in others.items():
        if other is not None and _sizes(other) != _sizes(x):
            raise ValueError(
                f"normplug.{who}: {name} must have the input's shape {_sizes(x)}; "
                f"got {_sizes(other)}."
            )


def trailing(who: str, x: Tensor, shape: Sequence[int], **vectors: Tensor | None) -> None:
    """Refuse an input that does not end in `shape`, and vectors that are not exactly `shape`."""
    shape = tuple(shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"normplug.{who}: input must be (*rows, *normalized_shape) with normalized_shape="
            f"{shape}; got input of shape {tuple(x.shape)}."
        )
    for name, vector in vectors.items():
        if vector is not None and vector.shape != shape:
            raise ValueError(
                f"normplug.{who}: {name} must have shape normalized_shape = {shape}; "
                f"got {tuple(vector.shape)}."
            )


def components(who: str, parts: Sequence[Tensor], shape: Sequence[int]) -> None:
    """Refuse a nested input without components, and components that do not end in `shape`."""
    if not parts:
        raise ValueError(
            f"normplug.{who}: a nested input needs at least one component; got none. Skip the call."
        )
    for part in parts:
        trailing(who, part, shape)


def _sizes(x: Tensor) -> tuple[Any, ...]:
    """The shape of x; of a nested tensor that has none, its components' shapes."""
    if x.is_nested and x.layout == torch.strided:
        return tuple(tuple(part.shape) for part in x.unbind())
    return tuple(x.shape)


def scalars(who: str, **values: Tensor | None) -> None:
    """Refuse running statistics of another size than one value."""
    for name, value in values.items():
        if value is not None and value.numel() != 1:
            raise ValueError(
                f"normplug.{who}: {name} must be a scalar tensor; got shape {tuple(value.shape)}."
            )


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
