"""BatchNorm over the joined batch of several processes, with a target variance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normplug import native
from normplug._activations import ActivationLike
from normplug._ops import batch_norm_sync as joined
from normplug._ops import peers
from normplug._ops.spec import Pool
from normplug._torch import BatchNormBase, LazyNormBase
from normplug.modules.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
    _BatchNorm,
)


class _SyncBatchNormForward(_BatchNorm):
    process_group: Any

    def _fused(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        activation: ActivationLike = None,
        pool: Pool | None = None,
        *,
        isolated: bool = False,
        keeps_residual: bool = False,
    ) -> Tensor:
        """As in `_BatchNorm`, but over the joined batch of all processes in training.

        There `isolated` has no effect.
        """
        group = self.group_to_join()
        if group is None:
            return super()._fused(
                input, residual, activation, pool, isolated=isolated, keeps_residual=keeps_residual
            )
        reading = (input, residual, None, activation, pool, keeps_residual)
        measured, compiling = self._probe is not None, torch.compiler.is_compiling()
        if not (measured or compiling):
            others = peers.known(group, input.device)
            y = native.forward(self, *reading, others) if others else None
            if y is not None:
                return y
        t, spec = self._call(input, residual, activation, pool, keeps_residual)
        y, variance = joined.batch_norm(t, spec, self.backend, group, measured)
        if measured:
            self._record(input, divisor=variance)
        elif not compiling and (others := peers.known(group, input.device)):
            native.learn(self, spec._replace(peers=others), self.backend, t, *reading, others)
        return y

    def group_to_join(self) -> Any:
        """The process group that a forward would now join; None if it would join none."""
        return joined.group_to_join(self.process_group) if self.training else None

    def waits_for_others(self) -> bool:
        """Whether a forward would now join other processes."""
        return self.group_to_join() is not None

    def _check_input_dim(self, input: Tensor) -> None:
        # It still takes the input of the class that it had before it was synchronised.
        before: Any = self._normplug.unsynced_class or nn.SyncBatchNorm
        before._check_input_dim(self, input)


class SyncBatchNorm(_SyncBatchNormForward, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that normalises to a target variance, on CPU tensors as well.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    In training, mean and var are those of the joined batch of all processes of the group, and so
    are the gradients and the running statistics. The processes' batches may differ in size, and
    some may be empty; each process must call the layers in the same order. Every process gets the
    same statistics, bit for bit. On GPUs of one host the kernels exchange the statistics
    themselves; elsewhere a collective is sent in each direction: `normplug.native.status()` says
    which, and why. The gradients of weight and bias are sums over the process's own batch, which
    `DistributedDataParallel` averages, as with torch's. In eval, in one process, or where no
    process group is initialised, it computes as `BatchNorm1d`, `2d` and `3d` do, and sends nothing.

    On CUDA the host never waits for the GPU, and so cannot reject a joined batch of one value per
    channel: the output is then the bias, and the running statistics are not updated.

    `DistributedDataParallel` refuses to wrap any `torch.nn.SyncBatchNorm` on the CPU. There, wrap
    first and then `normplug.swap(model, mode, sync=True)`.

    Args:
        *args: those of `torch.nn.SyncBatchNorm`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch", as in `BatchNorm1d`, the same in all processes. In
            several processes, "triton" falls back to torch where the kernels cannot run.
        **kwargs: those of `torch.nn.SyncBatchNorm`; `process_group` None is all processes.

    Shape: (N, C) or (N, C, *space), in and out. A layer converted from a `BatchNorm2d` still takes
    (N, C, H, W) only. Over several processes the gradient cannot be differentiated again.

    Raises:
        ValueError: an unknown mode or backend, input of another dimension, and on the CPU one value
            per channel in the joined batch.
        RuntimeError: another process has stopped, or has left the layer out.

    Examples:
        >>> import torch
        >>> SyncBatchNorm(8, mode="standard")(torch.ones(2, 8)).sum()
        tensor(0., grad_fn=<SumBackward0>)
    """


class LazySyncBatchNorm(_SyncBatchNormForward, LazyNormBase, BatchNormBase):
    """`torch.nn.LazyBatchNorm*d` after `swap(sync=True)`, until its first forward."""

    cls_to_become = SyncBatchNorm


for _cls in (BatchNorm1d, BatchNorm2d, BatchNorm3d):
    _cls._synchronised = SyncBatchNorm
for _lazy in (LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d):
    _lazy._synchronised = LazySyncBatchNorm
