"""CUDA graphs of the forward and backward of a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from normplug._ops import exchange
from normplug.experiment.errors import WHO, UserError
from normplug.modules import SyncBatchNorm

Loss = Callable[[Tensor, Tensor], Tensor]


class GraphedLoss:
    """A training loss whose forward and backward are replayed as CUDA graphs.

    `torch.cuda.make_graphed_callables` captures them as one autograd node: the rest of Lightning's
    optimisation works as usual, and `DistributedDataParallel` averages gradients after each replay.

    The first call captures the graphs, which changes no buffer and no random state. From then on,
    weights and buffers must keep their addresses. Inputs of another shape run without a graph. In
    several processes, all must capture at the same step: SyncBatchNorms exchange statistics.
    """

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        self._loss = loss
        self._net = net
        self._step: _Step | None = None  # None until it is captured
        self._shapes: tuple[torch.Size, ...] = ()
        self._peers: set[exchange.Peers] = set()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss; the next call overwrites its memory."""
        shapes = (inputs.shape, targets.shape)
        if self._step is None:
            self._peers = _peers_of(self._net, inputs.device)
            self._step, self._shapes = self._capture(inputs, targets), shapes
        for each in self._peers:
            each.check()  # layers do it too, but a replayed graph calls none
        return (self._step if shapes == self._shapes else self._loss)(inputs, targets)

    def _capture(self, *batch: Tensor) -> _Step:
        step, device = _Step(self._loss, self._net), batch[0].device
        buffers = [(buffer, buffer.clone()) for buffer in self._net.buffers()]
        random = torch.cuda.get_rng_state(device)
        static = tuple(tensor.clone() for tensor in batch)
        torch.cuda.make_graphed_callables(step, static, allow_unused_input=True)
        for buffer, values in buffers:
            buffer.copy_(values)
        torch.cuda.set_rng_state(random, device)
        # Nodes of the captured autograd graph are bound to the capture stream. If they were kept,
        # each gradient would wait for that stream.
        step.output.detach_()
        del step.output
        return step

    def release(self) -> None:
        if self._step is not None:
            vars(self._step).pop("forward")  # breaks a reference cycle, on torch < 2.15
            self._step = None


class _Step(nn.Module):
    """The loss as a module: `make_graphed_callables` gives gradients to a module's parameters."""

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.output = self.loss(inputs, targets)
        return self.output


def _peers_of(net: nn.Module, device: torch.device) -> set[exchange.Peers]:
    """The processes with which the layers of `net` join their batches inside the kernels."""
    found = set()
    for path, layer in net.named_modules():
        if not isinstance(layer, nn.SyncBatchNorm):
            continue
        others = None  # torch's own layer sends collectives
        if isinstance(layer, SyncBatchNorm):
            group = layer.group_to_join()
            if group is None:
                continue
            others = exchange.of(group, device)
        if others is None:
            raise UserError(
                f"{WHO}: graph=true needs processes that exchange statistics inside the kernels, "
                f"but {path} sends collectives. Leave graph=true out."
            )
        found.add(others)
    return found


def refuse_graph(trainer: Trainer) -> None:
    """Refuse `graph=true` for a Trainer that cannot use it: the graphs overwrite the gradients."""
    device, processes = trainer.strategy.root_device, trainer.world_size
    batches = trainer.accumulate_grad_batches
    averages = processes == 1 or isinstance(trainer.strategy, DDPStrategy)
    if device.type == "cuda" and averages and batches == 1:
        return
    raise UserError(
        f"{WHO}: graph=true needs an NVIDIA GPU, trainer.accumulate_grad_batches=1, and in several "
        f"processes trainer.strategy=ddp; this run is on {device}, accumulates {batches}, and has "
        f"{type(trainer.strategy).__name__} in {processes}. Leave graph=true out."
    )
