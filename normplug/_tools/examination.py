"""What `doctor` measures: some batches of a model in training, and one in evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from normplug import _convert, modules
from normplug._batches import Reader
from normplug._swap.inventory import Inventory
from normplug._tools import runs
from normplug._torch import BatchNormBase, in_backward, tree_leaves
from normplug.modules import TargetVarianceNorm
from normplug.reference import channel_dims

_BATCHES = 4
# Norms of rows. Subclasses may permute their input.
OF_ROWS = (nn.LayerNorm, nn.RMSNorm, modules.LayerNorm, modules.RMSNorm)
LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Moments(NamedTuple):
    """Mean and variance of each channel or row of an input, and how many values and samples."""

    mean: Tensor
    var: Tensor
    values: int  # of each channel or row
    samples: int


@dataclass
class Seen:
    """What was seen of one norm layer."""

    path: str
    layer: Any  # in the model itself, while a copy may have run
    calls: int = 0  # in the first forward
    repeats: int = 0  # calls inside a backward
    trains: bool = False  # whether it normalised by its batch in the first forward
    shape: tuple[int, ...] = ()  # of the last input
    dtype: torch.dtype | None = None
    trained: list[Moments] = field(default_factory=list)  # of its inputs in training
    # Of its first input in evaluation, of the first batch.
    evaluated: Moments | None = None


@dataclass
class Output:
    """The output of a layer in the first forward."""

    layer: nn.Module
    path: str
    is_read: bool = False  # by an operation outside norms


class Pair(NamedTuple):
    """A norm whose input is the output of a layer."""

    before: Output
    norm: str  # its path


def is_batch_norm(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm, frozen or not."""
    return issubclass(_convert.plain_class(layer), BatchNormBase)


def _moments(layer: Any, x: Tensor) -> Moments | None:
    """The moments over which a layer normalises its input; None if they are not known."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    samples = len(x)
    if is_batch_norm(layer):
        dims = channel_dims(x)
    elif isinstance(layer, nn.GroupNorm) and x.dim() > 1:
        x = x.reshape(samples * layer.num_groups, -1)
        dims = (1,)
    elif _convert.plain_class(layer) in OF_ROWS:
        dims = tuple(range(-len(layer.normalized_shape), 0))
    else:
        return None
    var, mean = torch.var_mean(x, dims, correction=0)
    return Moments(mean.flatten(), var.flatten(), x.numel() // mean.numel(), samples)


class Examination(TorchFunctionMode):
    """Runs a model, or a copy of it, under hooks, and records what they see.

    As a mode, it records which outputs of layers operations outside norms read.

    Args:
        model: the model itself, without wrappers.
        reader: reads for the module that runs.
    """

    def __init__(self, model: nn.Module, reader: Reader) -> None:
        super().__init__()
        self.seen: dict[str, Seen] = {}
        for layer, (path, *_) in Inventory(model).norms.items():
            self.seen[path] = Seen(path, layer)
        self.pairs: list[Pair] = []
        self.modes: dict[nn.Module, bool] = {}  # in training
        self._reader = reader
        self._phase = "first"  # then "training" and "evaluation"
        self._inside = 0  # how many norms are running
        self._outputs: Any = WeakTensorKeyDictionary()  # tensor -> Output

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside and isinstance(result, (Tensor, tuple, list)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf in self._outputs:
                    self._outputs[leaf].is_read = True
        return result

    def run(self, loader: Any, loss: Any) -> list[Any]:
        """Run the batches in training, the first with a backward, and again in evaluation.

        Returns the batches.
        """
        modules = dict(self._reader.model.named_modules())
        self._set_modes(modules.values())
        with ExitStack() as undo:
            for module in modules.values():
                if isinstance(module, TargetVarianceNorm):  # nothing to compile
                    undo.callback(setattr, module, "backend", module.backend)
                    module.backend = "torch"
            data = list(self._reader.batches(loader, _BATCHES))
            self._reader.call(data[0])  # before the hooks, since it may try some calls
            self._hook(modules, undo)
            with torch.enable_grad():
                self._first_batch(data[0], loss)
            with torch.no_grad():
                for batch in data[1:]:
                    self._reader.run(batch)
                self._phase = "evaluation"  # of all but the norms
                for path, module in modules.items():
                    module.training = module.training and path in self.seen
                self._reader.run(data[0])
        return data

    def _set_modes(self, modules: Iterable[nn.Module]) -> None:
        if not self._reader.model.training:
            for module in modules:
                module.training = not runs.is_frozen(module)
        self.modes = {module: module.training for module in modules}

    def _hook(self, modules: dict[str, nn.Module], undo: ExitStack) -> None:
        for path, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # it has no hooks
                continue
            if path in self.seen:
                before = partial(self._before, path)
                undo.callback(module.register_forward_pre_hook(before).remove)
            if path in self.seen or isinstance(module, LINEAR):
                after = partial(self._after, path)
                undo.callback(module.register_forward_hook(after).remove)

    def _first_batch(self, batch: Any, loss: Any) -> None:
        self._reader.model.zero_grad()
        with self:
            output = self._reader.run(batch)
        self._phase = "training"
        if loss is None:
            outputs = (t for t in tree_leaves(output) if isinstance(t, Tensor))
            value = sum(t.float().square().mean() for t in outputs if t.requires_grad)
        else:
            value = loss(output, self._reader.prepared(batch))
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()
        self._reader.model.zero_grad()

    def _before(self, path: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen = self.seen[path]
        x: Any = inputs[0] if inputs else None
        if in_backward():
            seen.repeats += 1
            return
        if self._phase == "first":
            self._inside += 1
            seen.calls += 1
            seen.trains = layer.training
        if not isinstance(x, Tensor) or x.numel() == 0:
            return
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            moments = _moments(layer, x)
        seen.shape = tuple(x.shape)
        seen.dtype = x.dtype
        if self._phase == "first" and x in self._outputs:
            self.pairs.append(Pair(self._outputs[x], path))
        if self._phase == "evaluation":
            seen.evaluated = seen.evaluated or moments
        elif moments is not None:
            seen.trained.append(moments)

    def _after(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._phase != "first" or in_backward():
            return
        if path in self.seen:
            self._inside -= 1
        if isinstance(output, Tensor):
            self._outputs[output] = Output(module, path)
