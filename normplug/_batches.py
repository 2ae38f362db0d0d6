"""Read batches: what a loader yields, and how to call a model with it.

docs/doctor.md lists the readings in order; `_Forward.calls` returns those that a signature
allows. If there are several, they are tried on the model, once per loader.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normplug._checks import must
from normplug._restore import generators_kept

_WAY_OUT = (
    "Pass a tensor, a tuple of the inputs, (inputs, labels), a mapping of forward's keywords, "
    "or a loader of these."
)


def runnable(model: nn.Module) -> nn.Module:
    """The module to call: inside the wrappers of DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of DDP, DataParallel, FSDP and torch.compile."""
    while True:
        model = runnable(model)
        inner = model._modules.get("_fsdp_wrapped_module")
        if inner is None:
            return model
        model = inner


class Call(NamedTuple):
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __str__(self) -> str:
        shown = [_described(value) for value in self.args]
        shown += [f"{name}={_described(value)}" for name, value in self.keywords.items()]
        return f"model({', '.join(shown)})"


_SHOWN = 8  # entries of a batch in an error
# A call that a model refused, and its error.
_Refusal: TypeAlias = tuple[Call, Exception]


class Reader:
    """Reads batches for one model.

    If more than one reading is possible, it tries them on the model. So use it only where a
    forward has no lasting effect.

    Attributes:
        caller: the normplug function that reads, for error messages.
        model: the module that is called, without wrappers.
    """

    def __init__(self, caller: str, model: nn.Module, **keywords: Any) -> None:
        """keywords: extra keyword arguments of every call."""
        self.caller = caller
        self.model = runnable(model)
        inner = unwrapped(model)
        self._name = type(inner).__name__
        self._forward = _Forward(inner.forward, self.prepared(keywords))
        self._reading: str | None = None  # name of the reading that the model takes

    def batches(self, data: Any, most: int | None = None) -> Iterator[Any]:
        """Yield the first `most` batches of a loader or a list; a batch yields itself."""
        if not (_is_loader(data) or _is_batch(data)):
            rule = "an iterable of batches, such as a DataLoader, or a batch"
            raise TypeError(must(self.caller, "loader", rule, type(data).__name__))
        is_loader = _is_loader(data) or self._is_series(data)
        count = 0
        for batch in itertools.islice(data if is_loader else [data], most):
            count += 1
            yield batch
        if count == 0:
            raise self._no_batch()

    def first(self, data: Any) -> Any:
        """The batch itself, or the first batch of a loader."""
        if not _is_loader(data):
            return data
        with generators_kept():
            for batch in data:
                return batch
        raise self._no_batch()

    def _no_batch(self) -> ValueError:
        return ValueError(f"normplug.{self.caller}: the loader yielded no batch.")

    def prepared(self, batch: Any) -> Any:
        """A copy of a batch on the model's device, with NumPy arrays as tensors.

        Floating-point arrays get the model's dtype.
        """
        return _copied(batch, *self._place)

    def call(self, batch: Any) -> Call:
        """How to call the model with a batch: the first reading that it takes."""
        calls = self._forward.calls(self.prepared(batch))
        if self._reading in calls:
            return calls[self._reading]
        refusals: list[_Refusal] = []
        for name, call in calls.items():
            error = None if len(calls) == 1 else self._refusal(name, batch)
            if error is None:
                self._reading = name
                return call
            refusals.append((call, error))
        raise self._error(f"the batch {_described(batch)}", refusals)

    def run(self, batch: Any) -> Any:
        """The model's output for a batch."""
        return self.apply(self.model, self.call(batch))

    def apply(self, model: nn.Module, call: Call) -> Any:
        """The output of a model. If it raises, the error names the arguments and a way out."""
        try:
            return model(*call.args, **call.keywords)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._error("these arguments", [(call, error)]) from error

    @cached_property
    def _place(self) -> tuple[torch.device | None, torch.dtype]:
        """The device of a model, and the dtype of its inputs."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        floating = [t for t in tensors if t.is_floating_point()]
        dtype = floating[0].dtype if floating else torch.get_default_dtype()
        return tensors[0].device if tensors else None, dtype

    def _refusal(self, name: str, batch: Any) -> Exception | None:
        """The model's error for one reading of a batch; None if the model takes it."""
        call = self._forward.calls(self.prepared(batch))[name]
        try:
            with torch.no_grad(), generators_kept():
                self.model(*call.args, **call.keywords)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return error
        return None

    def _is_series(self, data: Any) -> bool:
        """Whether the data are a list or tuple of batches, not one batch.

        Its elements are alike, with the same dtypes and numbers of dimensions, and the model
        takes them one by one.
        """
        if not isinstance(data, (tuple, list)):
            return False
        if not data:
            return True
        first = data[0]
        if not _is_batch(first) or not self._forward.calls(first):
            return False
        if any(_kind(other) != _kind(first) for other in data):
            return False
        # An element of another size may be no batch, such as a target wider than the input.
        for other in data:
            if _kind(other, sizes=True) != _kind(first, sizes=True):
                names = self._forward.calls(self.prepared(other))
                return any(self._refusal(name, other) is None for name in names)
        return True

    def _error(self, what: str, refusals: list[_Refusal]) -> RuntimeError:
        """The error for what the model refuses, with every call that was tried."""
        forward = f"{self._name}.forward{self._forward}"
        lines = [f"normplug.{self.caller}: {forward} does not take {what}."]
        for call, error in refusals:
            text = str(error).partition("\n")[0]
            lines.append(f"  {call} raised {type(error).__name__}: {text}")
        refused = RuntimeError("\n".join([*lines, _WAY_OUT]))
        if refusals:
            refused.__cause__ = refusals[-1][1]
        return refused


class _Forward:
    """The signature of a forward, and the calls that it allows."""

    def __init__(self, forward: Any, extra: dict[str, Any]) -> None:
        """extra: keywords of every call."""
        self._extra = extra
        try:
            self._signature = inspect.signature(forward)
        except (TypeError, ValueError):  # a function without a signature
            self._signature = inspect.signature(lambda *args, **keywords: None)
        self._required = 0  # inputs by position
        self._takes_all_keywords = False
        for p in self._signature.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                self._takes_all_keywords = True
            elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                self._required += p.default is p.empty and p.name not in extra

    def __str__(self) -> str:
        return str(self._signature)

    def calls(self, batch: Any) -> dict[str, Call]:
        """The readings of a batch that the signature allows, in order: name -> call.

        - keywords: of a mapping, the entries that forward names
        - whole: the batch as it is, as the only argument
        - inputs: the first elements, if forward requires more than one input
        - first: the first element, read by these rules, as for (inputs, labels)
        - all: all elements, as arguments
        """
        if isinstance(batch, Mapping):
            call = self._keywords(batch)
            if call.keywords and self._allows(call):
                return {"keywords": call}
        calls = {"whole": Call((batch,), self._extra)}
        if isinstance(batch, (tuple, list)) and batch:
            count = self._required
            if 1 < count <= len(batch):
                calls["inputs"] = Call(tuple(batch[:count]), self._extra)
            for name, call in self.calls(batch[0]).items():
                calls[f"first, {name}"] = call
            if len(batch) > max(count, 1):
                calls["all"] = Call(tuple(batch), self._extra)
        return {name: call for name, call in calls.items() if self._allows(call)}

    def _keywords(self, batch: Mapping[Any, Any]) -> Call:
        names = self._signature.parameters
        entries = {}
        for key, value in batch.items():
            if isinstance(key, str) and (key in names or self._takes_all_keywords):
                entries[key] = value
        return Call((), entries | self._extra)

    def _allows(self, call: Call) -> bool:
        try:
            self._signature.bind(*call.args, **call.keywords)
        except TypeError:
            return False
        return True


def _is_array(value: Any) -> bool:
    """Whether a value is a NumPy array or scalar."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _is_batch(value: Any) -> bool:
    """Whether a value can be a batch: not a loader, a number or a string."""
    if isinstance(value, (Tensor, Mapping, tuple, list)) or _is_array(value):
        return True
    return callable(getattr(value, "to", None))


def _is_loader(value: Any) -> bool:
    """Whether iterating over a value yields batches."""
    if isinstance(value, str) or _is_batch(value):
        return False
    return hasattr(value, "__iter__")


def _kind(value: Any, sizes: bool = False) -> Any:
    """What batches of one loader have in common: structure, dtypes and dimensions.

    sizes: also the sizes of all dimensions but the first.
    """
    if isinstance(value, Tensor) or _is_array(value):
        return str(value.dtype), value.ndim, tuple(value.shape[1:]) if sizes else None
    if isinstance(value, Mapping):
        return {key: _kind(inner, sizes) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_kind(inner, sizes) for inner in value]
    return type(value)


def _copied(value: Any, device: torch.device | None, dtype: torch.dtype) -> Any:
    """A copy of a batch on a device; see `Reader.prepared`."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        if device is not None:
            copied = copied.to(device)
        copied.requires_grad_(value.requires_grad)
        return copied if value.is_leaf else copied.clone()  # so it can be written to
    if _is_array(value):
        if value.dtype.kind not in "biufc":
            return value
        floating = dtype if value.dtype.kind == "f" else None
        return torch.tensor(value, device=device, dtype=floating)
    if isinstance(value, Mapping):
        return _copied_mapping(value, device, dtype)
    # Such as a PackedSequence, or a batch of graphs.
    if callable(getattr(value, "to", None)):
        return copy.copy(value) if device is None else copy.copy(value).to(device)
    if isinstance(value, (tuple, list)):
        elements = [_copied(element, device, dtype) for element in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*elements)
        return elements if isinstance(value, list) else tuple(elements)
    return value


def _copied_mapping(
    value: Mapping[Any, Any], device: torch.device | None, dtype: torch.dtype
) -> Mapping[Any, Any]:
    """A copy of a mapping; of the same class, such as BatchEncoding, if it is mutable."""
    entries = {key: _copied(entry, device, dtype) for key, entry in value.items()}
    if not isinstance(value, MutableMapping):
        return entries
    copied = copy.copy(value)
    for key, entry in entries.items():
        copied[key] = entry
    return copied


def _described(value: Any) -> str:
    """What a value is, with the shapes of its tensors, as an error shows it."""
    if isinstance(value, Tensor) or _is_array(value):
        return f"{type(value).__name__} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        some = itertools.islice(value.items(), _SHOWN)
        entries = [f"{key}: {_described(entry)}" for key, entry in some]
        return f"{type(value).__name__} {{{', '.join(entries)}}}"
    if isinstance(value, (tuple, list)):
        elements = ", ".join(map(_described, value[:_SHOWN]))
        return f"[{elements}]" if isinstance(value, list) else f"({elements})"
    return type(value).__name__
