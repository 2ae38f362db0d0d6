"""Stop a run at the first step whose loss is not finite, and find the cause."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from normplug.lightning import norm_layers


class Diverged(RuntimeError):
    """The loss became NaN or infinite.

    Attributes:
        step: the optimizer step of the failing forward, counted from 0 as in `metrics.csv`.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class FiniteLoss(Callback):
    """Raise `Diverged` before the optimizer takes a step on a loss that is not finite.

    On a GPU, the loss is copied to the host asynchronously, and read once the host has launched the
    whole backward. So the GPU stays busy, and the weights are still those of the failing forward.
    That forward is then repeated to find the first norm whose input is not finite.
    With several processes, the losses are all-reduced first, so that all processes stop.

    The mean losses of validation and test are checked when their epoch ends. The batch that caused
    it is then unknown, so only parameters are searched.

    Raises:
        Diverged: in every process.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._loss: Tensor | None = None  # of this process
        self._read: Tensor | None = None  # its sum over processes; on a GPU, a pinned copy of that
        self._arrived: Any = None  # the event after that copy

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch, in case its forward must be repeated."""
        self._batch = batch

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Start copying the loss to the host."""
        self._loss = total = loss.detach()
        if trainer.world_size > 1:
            total = total.clone()
            dist.all_reduce(total)
        if not total.is_cuda:
            self._read = total
            return
        if self._read is None or self._read.is_cuda or self._read.dtype != total.dtype:
            self._read = torch.empty((), dtype=total.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()
        self._read.copy_(total, non_blocking=True)
        self._arrived.record()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if the loss is not finite."""
        assert self._read is not None
        assert self._loss is not None
        if self._loss.is_cuda:
            self._arrived.synchronize()
        if not math.isfinite(self._read.item()):
            self._stop(trainer, pl_module, self._loss.item())
        self._batch = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if the mean loss is not finite."""
        _check_evaluation(trainer, pl_module, "val", "validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if the mean loss is not finite."""
        _check_evaluation(trainer, pl_module, "test", "test")

    def _stop(self, trainer: Trainer, pl_module: LightningModule, loss: float) -> None:
        batch, self._batch = self._batch, None
        finding = (loss, _cause(trainer, pl_module, batch[0]))
        ranks: list[Any] = [finding]
        if trainer.world_size > 1:
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, finding)
        rank = next((i for i, (own, _) in enumerate(ranks) if not math.isfinite(own)), 0)
        loss, causes = ranks[rank]
        where = f" in process {rank}" if trainer.world_size > 1 else ""
        raise _diverged(trainer, f"training loss is {loss}", where, causes)


def _check_evaluation(trainer: Trainer, pl_module: LightningModule, prefix: str, name: str) -> None:
    loss = float(trainer.callback_metrics[f"{prefix}/loss"])  # over all processes
    if not math.isfinite(loss):
        raise _diverged(trainer, f"{name} loss is {loss}", "", _bad_parameters(pl_module))


def _diverged(trainer: Trainer, what: str, where: str, causes: list[str]) -> Diverged:
    step = trainer.global_step
    epoch = trainer.current_epoch + (not trainer.testing)  # before a test, it is incremented
    place = f"at step {step} (epoch {epoch}){where}."
    return Diverged(" ".join([f"normplug.experiment: the {what} {place}", *causes]), step)


def _cause(trainer: Trainer, pl_module: LightningModule, inputs: Tensor) -> list[str]:
    """Name what is not finite, in sentences: parameters, the batch, or the input of a norm."""
    sentences = _bad_parameters(pl_module)
    if not _is_finite(inputs):  # tokens, being integers, are always finite
        sentences.append("The images of the batch are not finite.")
    if norm := _first_norm(trainer, pl_module, inputs):
        sentences.append(f"The first norm whose input is not finite is {norm}.")
    else:
        sentences.append("The input of every norm is finite.")
    return sentences


def _bad_parameters(pl_module: LightningModule) -> list[str]:
    """Return a sentence about parameters that are not finite; none if all are."""
    values = dict(pl_module.named_parameters())
    bad = [name for name, value in values.items() if not _is_finite(value)]
    if not bad:
        return []
    return [
        f"Parameters were not finite before this forward ({len(bad)} of {len(values)}, the first "
        f"is {bad[0]}), because of an earlier update."
    ]


def _first_norm(trainer: Trainer, pl_module: LightningModule, inputs: Tensor) -> str | None:
    """Repeat the forward; return path and class of the first norm with a non-finite input."""
    found: list[str] = []

    def check_inputs(path: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not found and not all(_is_finite(a) for a in arguments if isinstance(a, Tensor)):
            found.append(f"{path} ({type(module).__name__})")

    handles = [
        module.register_forward_pre_hook(partial(check_inputs, path))
        for path, module in norm_layers(pl_module)
    ]
    try:
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),  # compiled code would not call the hooks
            trainer.precision_plugin.forward_context(),
        ):
            pl_module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())
