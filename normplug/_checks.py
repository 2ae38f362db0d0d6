"""What a user can get wrong in a call, each with a sentence that says the rule and the way out."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS = (None, "relu", "silu", "gelu", "relu6", "hardswish")
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
    source = "backend"
    if name == "auto":
        source, name = "NORMPLUG_BACKEND", DEFAULT_BACKEND
    if name not in BACKENDS:
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
    if name not in AUTOCAST_OUTPUTS:
        raise ValueError(
            f"normplug.{who}: autocast_output must be one of {_quoted(AUTOCAST_OUTPUTS)}; "
            f"got {name!r}."
        )


def activation(who: str, name: str | None) -> None:
    """Refuse an activation that is not fused."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"normplug.{who}: activation must be None or one of {_quoted(ACTIVATIONS[1:])}; "
            f"got {name!r}."
        )


def floating(who: str, x: Tensor) -> None:
    """Refuse what cannot be normalised: integers, booleans, complex numbers."""
    if not x.is_floating_point():
        raise TypeError(
            f"normplug.{who}: input must be float16, bfloat16, float32 or float64; "
            f"got {x.dtype}. Convert it first, e.g. input.float()."
        )


def momentum(who: str, value: float | None, counter: Tensor | None) -> None:
    """Refuse a momentum that is no number, and a cumulative average that has no counter."""
    if value is None:
        if counter is None:
            raise ValueError(
                f"normplug.{who}: momentum=None averages over all batches and needs "
                "num_batches_tracked to count them; got None. Pass a counter or a float momentum."
            )
    elif not math.isfinite(value):
        raise ValueError(f"normplug.{who}: momentum must be None or a finite number; got {value}.")


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


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
