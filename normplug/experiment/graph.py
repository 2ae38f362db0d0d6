"""The forward and the backward of a training step as two CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from normplug.experiment.errors import WHO, UserError

Loss = Callable[[Tensor, Tensor], Tensor]


class GraphedLoss:
    """A training loss whose forward and backward are replayed as CUDA graphs.

    The host launches two graphs instead of every kernel, so a step of many small kernels does not
    wait for the host. The graphs run the same kernels as a step without them.

    `torch.cuda.make_graphed_callables` records them as one node of autograd. So the rest of
    Lightning's automatic optimisation works as usual: precision, clipping, any optimizer with any
    schedule, and callbacks that read the loss or the gradients. A graph of the whole step would
    need manual optimisation, and an optimizer whose learning rate is a tensor.
    `torch.compile(mode="reduce-overhead")` would also replace the kernels.

    The first call records. It runs the step a few times, and then restores the buffers, such as
    running statistics, and the random state of the GPU. From then on weights and buffers must keep
    their addresses. Inputs of another shape run without a graph. So do evaluation and the steps
    that a `VarianceLogger` measures, since they call `loss` directly.

    Args:
        loss: (inputs, targets) -> the loss of a batch; it reads the parameters of `net`.
        net: the module whose parameters get gradients.
    """

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        self._loss = loss
        self._net = net
        self._step: _Step | None = None  # None until it is recorded
        self._shapes: tuple[torch.Size, ...] = ()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss; its memory is overwritten by the next call."""
        shapes = (inputs.shape, targets.shape)
        if self._step is None:
            self._step, self._shapes = self._recorded(inputs, targets), shapes
        return (self._step if shapes == self._shapes else self._loss)(inputs, targets)

    def _recorded(self, *batch: Tensor) -> _Step:
        step = _Step(self._loss, self._net)
        static = tuple(tensor.clone() for tensor in batch)
        with _restored(self._net, batch[0].device):
            torch.cuda.make_graphed_callables(step, static, allow_unused_input=True)
        # Nodes of the recorded autograd graph belong to the stream of the recording. If they were
        # kept, each gradient would wait for that stream.
        step.recorded.detach_()
        del step.recorded
        return step

    def release(self) -> None:
        """Give back the graphs and their memory."""
        if self._step is not None:
            vars(self._step).pop("forward")  # a reference cycle before torch 2.15
            self._step = None


class _Step(nn.Module):
    """A loss as a module: `make_graphed_callables` gives gradients to a module's parameters."""

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.recorded = self.loss(inputs, targets)
        return self.recorded


@contextmanager
def _restored(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the net's buffers and the random state of its GPU after a `with` block."""
    before = [(buffer, buffer.clone()) for buffer in net.buffers()]
    random = torch.cuda.get_rng_state(device)
    yield
    for buffer, values in before:
        buffer.copy_(values)
    torch.cuda.set_rng_state(random, device)


def refuse_graph(trainer: Trainer) -> None:
    """Refuse `graph=true` for a Trainer that cannot use it.

    Raises:
        UserError: there is no GPU, there are several processes, or gradients accumulate.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        why = f"needs an NVIDIA GPU; this run is on {device}"
    elif trainer.world_size > 1:
        why = f"needs a single process; this run has {trainer.world_size}"
    elif trainer.accumulate_grad_batches > 1:
        why = (
            "overwrites the gradients in each step; trainer.accumulate_grad_batches="
            f"{trainer.accumulate_grad_batches} adds them up over several steps"
        )
    else:
        return
    raise UserError(f"{WHO}: graph=true {why}. Leave graph=true out.")
