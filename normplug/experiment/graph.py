"""Replay the forward and the backward of a training step as two CUDA graphs."""

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

    `torch.cuda.make_graphed_callables` captures them as one autograd node. So the rest of
    Lightning's automatic optimisation works as usual: precision, clipping, any optimizer with any
    schedule, and callbacks that read the loss or the gradients. A graph of the whole step would
    need manual optimisation, and an optimizer whose learning rate is a tensor.
    `torch.compile(mode="reduce-overhead")` would also replace the kernels.

    The first call captures the graphs. It runs the step a few times to warm up, and then restores
    the buffers, such as running statistics, and the GPU's random state. From then on, weights and
    buffers must keep their addresses. Inputs of another shape run without a graph. So do evaluation
    and the steps that a `VarianceLogger` measures, since they call `loss` directly.

    Args:
        loss: (inputs, targets) -> the loss of a batch; it reads the parameters of `net`.
        net: the module whose parameters get gradients.
    """

    def __init__(self, loss: Loss, net: nn.Module) -> None:
        self._loss = loss
        self._net = net
        self._step: _Step | None = None  # None until it is captured
        self._shapes: tuple[torch.Size, ...] = ()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss; the next call overwrites its memory."""
        shapes = (inputs.shape, targets.shape)
        if self._step is None:
            self._step, self._shapes = self._capture(inputs, targets), shapes
        return (self._step if shapes == self._shapes else self._loss)(inputs, targets)

    def _capture(self, *batch: Tensor) -> _Step:
        step = _Step(self._loss, self._net)
        static = tuple(tensor.clone() for tensor in batch)
        with _restored(self._net, batch[0].device):
            torch.cuda.make_graphed_callables(step, static, allow_unused_input=True)
        # Nodes of the captured autograd graph are bound to the capture stream. If they were kept,
        # each gradient would wait for that stream.
        step.output.detach_()
        del step.output
        return step

    def release(self) -> None:
        """Free the graphs and their memory."""
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


@contextmanager
def _restored(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the net's buffers and its GPU's random state after a `with` block."""
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
            f"{trainer.accumulate_grad_batches} accumulates them over several steps"
        )
    else:
        return
    raise UserError(f"{WHO}: graph=true {why}. Leave graph=true out.")
