"""What runs in the program: it swaps and fuses each model that the program moves or trains."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import sys
import warnings
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import get_worker_info

from normplug import functional
from normplug._batches import runnable, unwrapped
from normplug._convert import FORWARDS, fused_modules, normplug_layers
from normplug._fuse.fuse import fuse
from normplug._ops.call import kinds_of_calls
from normplug._run.command import chosen
from normplug._swap import record
from normplug._swap.check import check
from normplug._swap.plan import plan
from normplug._swap.swap import swap, unswap
from normplug._table import counts, some, table
from normplug.modes import target_variance
from normplug.modules import TargetVarianceNorm


def start() -> None:
    """Take part in this process, with the options that the command has left in the environment."""
    options = json.loads(os.environ["NORMPLUG_RUN"])
    run = Run(Namespace(**(chosen() if options == 1 else options)))
    _patch(run)
    atexit.register(run.report, os.getpid())


# What a report says of a model that an error has left unchanged. It is not taken again.
_FAILED = "all: an error"


class Row(NamedTuple):
    """What was done with a model."""

    model: str
    norms: int = 0
    swapped: int = 0
    fused: int = 0
    left: str = "none"


class Run:
    """The models of this process, and what was done with each of them."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.filters = {"include": options.include, "exclude": options.exclude}
        self.rows: dict[weakref.ref[nn.Module], Row] = {}
        self.unchecked: set[int] = set()  # ids of models
        self.elsewhere: dict[str, None] = {}  # classes of models on no GPU, in order

    def moved(self, model: nn.Module) -> None:
        """Take a model that was moved, unless it was taken earlier."""
        if weakref.ref(model) not in self.rows:
            self.take(model)

    def trained(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the models that an optimizer trains."""
        for root in self._roots([p for g in optimizer.param_groups for p in g["params"]]):
            self.take(root)

    def sharded(self, module: nn.Module) -> None:
        """Take the model of a module, before FSDP moves it to a GPU and changes its class."""
        for root in self._roots(_parameters(module)):
            self.take(root, anywhere=True)

    def _roots(self, parameters: Any) -> list[nn.Module]:
        """The outermost modules that have one of the parameters, if one of these is new."""
        ids = set(map(id, parameters))
        for reference in self.rows:
            model = reference()
            if model is not None:
                ids -= set(map(id, _parameters(model)))
        if not ids:
            return []
        modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        inner = {id(child) for m in modules for child in _children(m)}
        outer = [m for m in modules if id(m) not in inner]
        return [m for m in outer if not ids.isdisjoint(map(id, _parameters(m)))]

    def take(self, model: Any, anywhere: bool = False) -> None:
        """Swap and fuse a model in place, if it is on a GPU, or anywhere."""
        if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
            return
        is_there = anywhere or any(map(self._is_on_device, _parameters(model)))
        if get_worker_info() is not None:
            return
        if not is_there:
            self.elsewhere[type(unwrapped(model)).__name__] = None
            return
        model = unwrapped(model)
        row = self.rows.setdefault(weakref.ref(model), Row(type(model).__name__))
        if row.left == _FAILED:
            return
        with self._kept(model):
            planned = plan(model, self.options.mode, **self.filters)
            layers = [each.module for each in planned if each.becomes]
            swapped = [m for m in layers if isinstance(m, TargetVarianceNorm)]
            if swapped and len(swapped) == len(layers):
                return  # a copy, or a part of another model
            left = [f"{each.kind} ({each.note})" for each in planned if not each.becomes]
            row = row._replace(norms=len(planned), left=counts(Counter(left)))
            if not all(layer._normplug.by_run for layer in swapped):
                row = row._replace(left="all: the program swaps it itself")
            elif layers:
                row = self._swap(model, row)
            self.rows[weakref.ref(model)] = row

    def _is_on_device(self, parameter: torch.Tensor) -> bool:
        if self.options.devices == "any":
            return not parameter.is_meta
        return parameter.is_cuda

    def _swap(self, model: nn.Module, row: Row) -> Row:
        device = _parameters(model)[0].device
        if device.type == "cuda":
            _try_kernels(device)
        # As in PyTorch: no extra buffers, and the same dtypes under autocast.
        same = {"track_running_stats": False, "autocast_output": "float32"}
        swap(model, self.options.mode, **self.filters, **same)  # type: ignore[arg-type]
        layers = [layer for _, layer in normplug_layers(model)]
        for layer in layers:
            layer._set(by_run=True)
        record.forget(model)
        fused: set[nn.Module] = set()
        if self.options.fuse:
            fuse(model)
            for module in fused_modules(model).values():
                fused |= vars(module)[FORWARDS].fusions(module).keys()
        if self.options.dry_run:
            unswap(model, fold=False)
        elif self.options.check:
            self.unchecked.add(id(model))
        return row._replace(swapped=len(layers), fused=len(fused))

    def give_back(self, model: nn.Module) -> None:
        """Give a model its stock layers, with the same outputs, for a tool that needs them."""
        if any(layer._normplug.by_run for _, layer in normplug_layers(model)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                unswap(model)

    def check(self, model: nn.Module, args: Any, keywords: Any) -> None:
        """Compare a model with its stock model, on the first batch that it gets."""
        model = runnable(model)  # torch.compile calls the inner model without `checked`
        if id(model) in self.unchecked:
            self.unchecked.remove(id(model))
            if list(normplug_layers(model)):  # the program may have folded all of them
                with self._kept(model):
                    check(model, *args, **keywords)

    @contextmanager
    def _kept(self, model: nn.Module) -> Iterator[None]:
        """Suppress warnings. After an error, restore the model and print a line."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            except Exception as error:
                layers = normplug_layers(model)
                if all(layer._normplug.by_run for _, layer in layers):
                    unswap(model, fold=False)
                reference = weakref.ref(model)
                row = self.rows[reference]
                self.rows[reference] = Row(row.model, row.norms, left=_FAILED)
                why = " ".join(str(error).split()) or type(error).__name__
                _say(f"normplug run: {row.model} is unchanged: {why}")

    def report(self, process: int) -> None:
        """Print the table: of the program's first process, and of others that have models."""
        is_first = os.environ.get("NORMPLUG_RUN_PID") == str(process)
        # A process that was forked from this one calls this, too.
        if os.getpid() != process or not (is_first or self._done()):
            return
        if self.options.report:
            try:
                with open(self.options.report, "a", encoding="utf-8") as file:
                    print(self, file=file)
            except OSError as error:
                _say(f"normplug run: the report cannot be written: {error}")
        elif os.environ.get("RANK", "0") == "0":
            _say(str(self))

    def _done(self) -> Counter[Row]:
        return Counter(row for row in self.rows.values() if row != Row(row.model))

    def __str__(self) -> str:
        head = f"normplug run, mode {self.options.mode}"
        if self.options.dry_run:
            head += ", dry run: nothing was swapped"
        rows: list[tuple[str, ...]] = [("models", *Row._fields)]
        rows += [(str(count), *map(str, row)) for row, count in self._done().items()]
        if len(rows) == 1:
            return f"{head}: {self._why_none()}"
        lines = [head, table(rows), f"kinds of calls: {counts(kinds_of_calls())}"]
        if self._is_swapped_in_another_mode():
            lines.append(
                "pickles of whole models: they need normplug to be loaded, since the mode is not "
                "standard; pickle normplug.unswap(model) to need none"
            )
        return "\n".join(lines)

    def _is_swapped_in_another_mode(self) -> bool:
        is_swapped = any(row.swapped for row in self.rows.values())
        if self.options.dry_run or not is_swapped:
            return False
        return target_variance(self.options.mode) != 1.0

    def _why_none(self) -> str:
        """Why no model was swapped."""
        if self.options.devices == "any":
            return "this process moved no model with norms, and trained none"
        why = "this process moved no model with norms to a GPU, and trained none on one"
        if not self.elsewhere:
            return why
        models = some(list(self.elsewhere))
        return (
            f"{why}. On other devices: {models}. For a test on the CPU, use --devices any"
        )


def _say(text: str) -> None:
    # `sys.stderr` may be None, closed, or a broken pipe.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{text}\n")


def _children(module: nn.Module) -> list[nn.Module]:
    return list(filter(None, vars(module).get("_modules", {}).values()))


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module, even if its class has another `parameters`.

    None of one whose constructor has not run, which the search for models may find.
    """
    if "_parameters" not in vars(module):
        return []
    return list(nn.Module.parameters(module))


@functools.cache
def _try_kernels(device: torch.device) -> None:
    """Raise any error of the kernels here, not in a step of the program."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(4, 8, device=device, requires_grad=True)
        functional.layer_norm(x, (8,)).sum().backward()


def _patch(run: Run) -> None:
    """Have the functions that move, wrap, compile or train a model notify `run`."""
    if run.options.when == "to":
        for name in ("to", "cuda", "to_empty"):
            _wrap(nn.Module, name, after=run.moved)
    _wrap(torch, "compile", before=run.take)
    _wrap(nn.Module, "compile", before=run.take)
    _wrap(nn.parallel.DistributedDataParallel, "__init__", before=run.take, place=1)
    _wrap(torch.optim.Optimizer, "__init__", after=run.trained)
    quantization = torch.ao.quantization
    for name in ("fuse_modules", "fuse_modules_qat"):
        _wrap(quantization, name, before=run.give_back)
    torch.quantization.fuse_modules = quantization.fuse_modules
    if "WORLD_SIZE" in os.environ:
        fsdp = import_module("torch.distributed.fsdp")
        _wrap(fsdp, "fully_shard", before=run.sharded)
        _wrap(fsdp.FullyShardedDataParallel, "__init__", before=run.sharded, place=1)
    if run.options.check:
        call = nn.Module.__call__

        def checked(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            if not torch.compiler.is_compiling():
                run.check(module, args, keywords)
            return call(module, *args, **keywords)

        nn.Module.__call__ = checked  # type: ignore[method-assign]


def _nothing(model: Any) -> None:
    pass


def _wrap(
    owner: Any,
    name: str,
    before: Callable[[Any], None] = _nothing,
    after: Callable[[Any], None] = _nothing,
    place: int = 0,
) -> None:
    """Patch a function to call `before` and `after` with one of its arguments; ignore errors."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **keywords)
        argument = [*args, *keywords.values(), None, None][place]
        with suppress(Exception):
            before(argument)
        result = function(*args, **keywords)
        with suppress(Exception):
            after(argument)
        return result

    setattr(owner, name, wrapped)
