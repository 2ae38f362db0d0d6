"""BatchNorm layers with a target variance, in one process and over several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normplug import reference
from normplug._activations import ActivationLike
from normplug._checks import as_number
from normplug._ops import can_run, exchange, torch_way
from normplug._ops.batch_norm import BatchNormSpec, channel_stats, with_gradient
from normplug._ops.spec import Pool, Tensors
from normplug._torch import NormBase
from normplug.modules.base import FusionSites, TargetVarianceNorm, forward_of_channels

# Where a layer's reading has the spec's `join`: after input, residual, input bias, and the fields
# from `activation` to `isolated`.
_PLACE_OF_JOIN = 7


class _BatchNorm(TargetVarianceNorm, NormBase):
    _function = "functional.batch_norm"
    _by_channel = True

    forward = forward_of_channels

    def _fused(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        activation: ActivationLike = None,
        pool: Pool | None = None,
        *,
        keeps_residual: bool = False,
        isolated: bool = False,
    ) -> Tensor:
        """Compute `activation(forward(input) + residual)`, then max pooling, in one call.

        pool: only after relu and without a residual.
        keeps_residual: whether to save the residual, so that the backward can recompute the output.
        isolated: whether a compiler gains nothing by fusing the norm with its neighbours.
        """
        y: Tensor = self._run(
            input, residual, None, activation, pool, keeps_residual, isolated
        )
        return y

    def _fused_norms(
        self, input: Tensor, residual: Tensor, other: Any, activation: ActivationLike
    ) -> Tensor:
        """Compute `activation(forward(input) + other(residual))`; other: a layer of these classes.

        Only where `_may_add` both layers' results.
        """
        weight, bias = other._affine()
        options = (None, False, False, self._join(input))
        norms = with_gradient(
            weight,
            bias,
            other.target_variance,
            lambda: other._run(residual, None, None, None, *options, True),
        )
        y: Tensor = self._run(
            input, residual, norms, activation, *options, False, other._eps
        )
        return y

    def _may_add(self, x: Tensor) -> bool:
        """Whether kernels may run this layer in one call with another norm, which it is added to.

        Both normalise by the batch, of one process or of the same group. All processes of a group
        get the same answer.
        """
        if can_run.is_compiling() or type(x) is not Tensor:
            return False
        by_batch = self.training or self.running_var is None
        if not by_batch or not can_run.has_kernels("fuse", self.backend, x):
            return False
        join = self._join(x)
        return join == 0 or x.shape[1] <= exchange.most_channels(join)

    def _join(self, x: Tensor) -> int:
        """The number of the `exchange.Join` of the processes that would join their batches."""
        return 0

    def _is_guarded(self) -> bool:
        # A call that updates nothing runs in the same way each time: activation checkpointing
        # raises an error if a repeated forward saves other tensors.
        var = self.running_var
        if var is None or not (self.training and self.track_running_stats):
            return False
        # The kernels look at the batch alone, and a step towards it can overflow in float16.
        is_narrow = var.dtype == torch.float16
        return self.momentum is None or is_narrow or torch_way.is_repeated()

    def _call(
        self,
        input: Tensor,
        residual: Tensor | None,
        input_bias: Tensor | None,
        *options: Any,
    ) -> tuple[Tensors, BatchNormSpec]:
        """Options: the fields of the spec from `activation` to `residual_eps`.

        input_bias: the result of the `BatchNormSpec.for_residual` call of the residual's norm.
        """
        self._check_input_dim(input)
        mean, var, tracked = self._statistics()
        training = self.training or (mean is None and var is None)
        if self.training and not self.track_running_stats:
            mean = var = tracked = None
        momentum = as_number(self.momentum)
        if momentum is None and tracked is None:
            # Not updated without its counter, as in a checkpoint of torch before 0.4.1.
            momentum = 0.0
        weight, bias = self._affine()
        t = Tensors(input, residual, weight, bias, input_bias, mean, var, tracked)
        settings = self._normplug
        numbers = (momentum, settings.eps, settings.target_variance)
        trains = any(v is not None and v.requires_grad for v in (weight, bias))
        constant = not (training or trains)
        # `_is_guarded` covers a cumulative average, which no kernel keeps safe.
        safe = settings.statistics == "safe" and training and momentum is not None
        fields: Any = {"constant": constant, "safe": safe}
        return t, BatchNormSpec(training, *numbers, *options, **fields)

    _call_reads = (*TargetVarianceNorm._call_reads, "momentum", "track_running_stats")
    _fusion_sites = FusionSites(
        {"forward": forward}, after=("activation", "addition", "max_pool", "norm")
    )

    def _affine_shape(self) -> tuple[int, ...]:
        return (self.num_features,)

    def _example_shape(self) -> tuple[int, ...]:
        thawed = getattr(type(self), "_thawed_class", type(self))
        input_class = self._normplug.unsynced_class or thawed
        for cls, space in ((nn.BatchNorm2d, (2, 2)), (nn.BatchNorm3d, (2, 2, 2))):
            if issubclass(input_class, cls):
                return (8, self.num_features, *space)
        return (8, self.num_features)

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        mean = None if training else self.running_mean
        var = None if training else self.running_var
        return reference.batch_norm(
            x, self.weight, self.bias, **self._numbers(), mean=mean, var=var
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        return channel_stats(x)[1]


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` that normalises to a target variance.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    Args:
        *args: passed to `torch.nn.BatchNorm1d`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch"; the variable `NORMPLUG_BACKEND` overrides "auto".
        **kwargs: passed to `torch.nn.BatchNorm1d`.

    Shape: (N, C) or (N, C, L), in and out. Details: `normplug.functional.batch_norm`.

    Raises:
        ValueError: an unknown mode or backend, no channels, or input of another dimension.
        TypeError: an argument of another type.

    Examples:
        >>> BatchNorm1d(8)
        BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, ..., mode=standard)
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that normalises to a target variance; (N, C, H, W).

    It takes the arguments of `BatchNorm1d` and raises the same errors.
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` that normalises to a target variance; (N, C, D, H, W).

    It takes the arguments of `BatchNorm1d` and raises the same errors.
    """


class _SyncBatchNorm(_BatchNorm):
    process_group: Any

    _function = "SyncBatchNorm"

    def _run(self, *reading: Any) -> Any:
        """Run a call over the joined batch of all processes in training."""
        join = self._join(reading[0])
        if join:
            reading = (*reading[:_PLACE_OF_JOIN], join, *reading[_PLACE_OF_JOIN + 1 :])
        return super()._run(*reading)

    def _join(self, x: Tensor) -> int:
        group = self.group_to_join()
        if group is None:
            return 0
        return exchange.number_of(group, x.device, self._normplug.backend)

    def group_to_join(self) -> Any:
        """The process group whose batches a forward would now join; None if there is none."""
        return exchange.group_to_join(self.process_group) if self.training else None

    def _check_input_dim(self, input: Tensor) -> None:
        # It still takes the input of the class that it had before it was synchronised.
        before: Any = self._normplug.unsynced_class or nn.SyncBatchNorm
        before._check_input_dim(self, input)


class SyncBatchNorm(_SyncBatchNorm, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that normalises to a target variance, on CPU tensors as well.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    In training, mean and var, the gradients and the running statistics belong to the joined batch
    of all processes of the group. The processes' batches may differ in size, and some may be empty;
    each process must call the layers in the same order. Every process gets the same statistics, bit
    for bit. On GPUs of one host the kernels exchange the statistics themselves; elsewhere a
    collective is sent in each direction: `normplug.status()` says which, and why. The gradients of
    weight and bias are sums over the process's own batch, which `DistributedDataParallel` averages.
    In eval, in one process, or without an initialised process group, it is a BatchNorm and sends
    nothing.

    On CUDA the host never waits for the GPU, and so cannot reject a joined batch of one value per
    channel: the output is then the bias, and the running statistics are not updated.

    `DistributedDataParallel` refuses to wrap any `torch.nn.SyncBatchNorm` on the CPU. There, wrap
    first and then `normplug.swap(model, mode, sync=True)`.

    It takes the arguments of `torch.nn.SyncBatchNorm`, `mode` and `backend`. The backend must be
    the same in all processes; "triton" falls back to torch where the kernels cannot run.

    Shape: (N, C) or (N, C, *space), in and out. A layer converted from a `BatchNorm2d` still takes
    (N, C, H, W) only. Over several processes the gradient cannot be differentiated again.

    Raises:
        ValueError: an unknown mode or backend, input of another dimension, and on the CPU one value
            per channel in the joined batch.
        RuntimeError: another process has stopped, or has skipped the layer.

    Examples:
        >>> import torch
        >>> SyncBatchNorm(8, mode="standard")(torch.ones(2, 8)).sum()
        tensor(0., grad_fn=<SumBackward0>)
    """


for _cls in (BatchNorm1d, BatchNorm2d, BatchNorm3d):
    _cls._synchronised = SyncBatchNorm
