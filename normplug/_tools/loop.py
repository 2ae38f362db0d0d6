"""When the steps of a training loop begin and end, for `normplug.watch`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from normplug._torch import in_backward, remove_hooks


class _Watch(Protocol):
    """What a `Loop` calls."""

    def start(self, model: nn.Module | None = None) -> None: ...
    def has_run(self) -> bool: ...
    def finish(self, step: int) -> None: ...
    def release(self) -> None: ...


class Loop:
    """A training loop whose steps a watch measures: each `every`-th one.

    A step is a forward of the model, in training and with gradients enabled. Until the first such
    forward, the loop may call parts of the model alone. A step then ends with a step of the
    optimizer, and the latest call of each norm in it is measured.

    Forward hooks of the model see its forwards, and a hook of all optimizers sees their steps.
    Parts have no hooks: `fuse` would leave them unfused, and compiled code would not call them.
    """

    def __init__(self, model: nn.Module, every: int, watch: _Watch) -> None:
        self.model = model
        self.copies: WeakSet[nn.Module] = WeakSet()  # made since `begin`
        self.lock = threading.RLock()  # held by each hook
        self._every = every
        self._watch = watch
        self._step = 0  # the number of the next step
        self._hooks: list[Any] = []
        # A forward of the model that is a step.
        self._thread: int | None = None  # where it runs; None: none runs
        self._depth = 0  # how many calls of the model run in this thread
        self._error: BaseException | None = None  # what was being handled when it began
        # Steps of an optimizer.
        self._optimizer_hook: Any = None  # None: a forward of the model has run
        self._measures_parts = False
        self._optimizers = _Optimizers(model)

    @property
    def is_followed(self) -> bool:
        """Whether it is between `begin` and `end`."""
        return bool(self._hooks)

    def begin(self) -> None:
        """Follow the loop from now on."""
        if self.is_followed:
            raise RuntimeError(
                "normplug.watch: this watch is already running. Call normplug.watch again."
            )
        after = _Hook(self, self._after)
        self._hooks = [
            self.model.register_forward_pre_hook(_Hook(self, self._before)),
            self.model.register_forward_hook(after, always_call=True),
        ]
        self._optimizer_hook = register_optimizer_step_post_hook(self._after_optimizer)
        self._start_parts()

    def end(self, completed: bool) -> None:
        """Stop following it; if it completed, finish a step of parts that has begun."""
        with self.lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._thread = None
            if completed and self._optimizer_hook is not None:
                self._finish_parts()
            self._leave_parts()
            self._watch.release()
        for copy in self.copies:
            remove_hooks(copy, _Nothing)

    # Steps that are forwards of the model.

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if self._thread is not None:
            if self._thread == threading.get_ident():
                self._depth += 1
            return
        if in_backward():  # activation checkpointing repeats the last forward
            return
        if not (module.training and torch.is_grad_enabled()):
            if not self._measures_parts:
                self._watch.release()
            return
        self._leave_parts()
        self._watch.release()
        self._thread = threading.get_ident()
        self._depth = 1
        self._error = sys.exc_info()[1]
        if self._step % self._every == 0:
            self._watch.start()
        self._step += 1

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._thread != threading.get_ident():
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._thread = None
        step = self._step - 1
        failed = sys.exc_info()[1] is not self._error
        self._error = None
        if failed:
            self._watch.release()
        elif step % self._every == 0:
            self._watch.finish(step)

    # Steps that are steps of an optimizer.

    def _start_parts(self) -> None:
        self._measures_parts = self._step % self._every == 0
        if self._measures_parts:
            self._watch.start(self.model)

    def _finish_parts(self) -> None:
        if self._measures_parts and self._watch.has_run():
            self._watch.finish(self._step)
        self._watch.release()
        self._step += 1

    def _leave_parts(self) -> None:
        self._measures_parts = False
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        with self.lock:
            # Another thread may have removed this hook.
            if self._optimizer_hook is not None and self._optimizers.ends_step(optimizer):
                self._finish_parts()
                self._start_parts()


class _Optimizers:
    """The optimizers of a model, which may take turns, as those of a GAN do.

    A step of the loop ends when the first one steps. If another one steps twice in between, the
    first one is no longer in use, and the other one takes its place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trains: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._first: ref[Optimizer] | None = None
        # Others that have stepped since the first.
        self._since: WeakSet[Optimizer] = WeakSet()

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Whether this step of an optimizer ends a step of the loop."""
        if not self._trains_model(optimizer):
            return False
        first = None if self._first is None else self._first()
        if first is None or optimizer in self._since:
            first = optimizer
            self._first = ref(optimizer)
        if optimizer is not first:
            self._since.add(optimizer)
            return False
        self._since.clear()
        return True

    def _trains_model(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._trains:
            trained = {p for group in optimizer.param_groups for p in group["params"]}
            self._trains[optimizer] = not trained.isdisjoint(self._model.parameters())
        return self._trains[optimizer]


class _Hook:
    """A forward hook of the watched model, which does nothing for other modules.

    In a copy or a pickle of the model, `_Nothing` takes its place.
    """

    def __init__(self, loop: Loop, function: Callable[..., None]) -> None:
        self._loop = loop
        self._function = function

    def __call__(self, module: nn.Module, *values: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        # The replicas of DataParallel and shallow copies have the hook, too.
        if module is not self._loop.model:
            return
        with self._loop.lock:
            if self._loop.is_followed:  # another thread may have ended it
                self._function(module, *values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        copy = memo.get(id(self._loop.model))
        if copy is not None:
            self._loop.copies.add(copy)
        return _Nothing()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    """A hook that does nothing but remove itself."""

    def __call__(self, module: nn.Module, *values: Any) -> None:
        remove_hooks(module, _Nothing)
