"""BatchNorm layers with a target variance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from normplug import functional, native, reference
from normplug._activations import ActivationLike
from normplug._checks import as_number
from normplug._ops import likely
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.call import call
from normplug._ops.spec import Pool, Tensors
from normplug._torch import BatchNormBase
from normplug.modules.base import TargetVarianceNorm
from normplug.modules.fusion_sites import FusionSites


class _BatchNorm(TargetVarianceNorm, BatchNormBase):
    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, update the running statistics."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        return self._fused(input)

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
        """Compute `activation(forward(input) + residual)`, then max pooling, in one call.

        While a `VarianceLogger` measures, this measures as well.

        Args:
            input: as in `forward`.
            residual: as in `normplug.functional.batch_norm`.
            activation: as in `normplug.functional.batch_norm`.
            pool: max pooling, only after relu and without a residual.
            isolated: whether a compiler has nothing to fuse the norm with.
            keeps_residual: whether to save the residual, so that the backward can recompute the
                output.
        """
        others = (activation, pool, keeps_residual)
        measures = self._probe is not None  # read first: another thread may unswap the layer
        compiling = torch.compiler.is_compiling()
        y = None if compiling else native.forward(self, input, residual, None, *others)
        if y is None and residual is None and activation is None and pool is None:
            y = self._by_torch(input)
        if y is None:
            t, spec = self._call(input, residual, *others)
            backend = self._normplug.backend
            y = call("functional.batch_norm", t, spec, backend, isolated=isolated)
            if not compiling:
                native.learn(self, spec, backend, t, input, residual, None, *others)
        if measures:
            self._record(input)
        return y

    def _by_torch(self, x: Tensor) -> Tensor | None:
        """The call by torch's function; None if it takes a kernel, or more than the function."""
        weight, bias = self._affine()
        mean, var, tracked = self._statistics()
        if self.training and not self.track_running_stats:
            mean = var = tracked = None
        own, momentum = self._normplug, self.momentum
        training = self.training or mean is None
        updates = training and mean is not None
        if (
            not self._runs_torch(x, weight)
            or not x.is_floating_point()
            or (mean is None) != (var is None)
            or (updates and (tracked is None or type(momentum) is not float))
        ):
            return None
        self._check_input_dim(x)
        # A single sample, position or channel: PyTorch's CPU kernels take gradients in some layouts
        # for gradients in others there.
        if min(x.shape) < 2 or x.shape[1] != self.num_features:
            return None
        if updates:
            tracked.add_(1)  # type: ignore[union-attr]
        cudnn = x.is_cuda and torch.backends.cudnn.enabled
        step: Any = momentum if updates else 0.0
        weight = self._scaled(weight)
        return torch.batch_norm(x, weight, bias, mean, var, training, step, own.eps, cudnn)

    def _call(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        activation: ActivationLike = None,
        pool: Pool | None = None,
        keeps_residual: bool = False,
    ) -> tuple[Tensors, BatchNormSpec]:
        """The tensors of a call, and its other arguments."""
        self._check_input_dim(input)
        mean, var, tracked = self._statistics()
        training = self.training or (mean is None and var is None)
        if self.training and not self.track_running_stats:
            mean = var = tracked = None
        momentum = as_number(self.momentum)
        if momentum is None and tracked is None:
            momentum = 0.0  # not updated without its counter (a checkpoint of torch < 0.4.1)
        t = Tensors(input, residual, *self._affine(), None, mean, var, tracked)
        own = self._normplug
        eps, tv = as_number(own.eps), own.target_variance
        spec = BatchNormSpec(training, momentum, eps, tv, activation, pool, keeps_residual)
        return t, spec

    _call_reads = (*TargetVarianceNorm._call_reads, "momentum", "track_running_stats")
    _fusion_sites = FusionSites(
        {"forward": forward}, after=("activation", "addition", "max_pool"), measures=True
    )

    def _likely_call(self) -> likely.Call:
        return likely.Call(BatchNormSpec, self._affine_shape())

    def _affine_shape(self) -> tuple[int, ...]:
        return (self.num_features,)

    def _example_shape(self) -> tuple[int, ...]:
        input_class = self._normplug.unsynced_class or type(self)
        for cls, space in ((nn.BatchNorm2d, (2, 2)), (nn.BatchNorm3d, (2, 2, 2))):
            if issubclass(input_class, cls):
                return (8, self.num_features, *space)
        return (8, self.num_features)

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        mean, var = (None, None) if training else (self.running_mean, self.running_var)
        affine = self.weight, self.bias
        return reference.batch_norm(x, *affine, **self._numbers(), mean=mean, var=var).y

    def _variance(self, x: Tensor) -> Tensor:
        return functional.channel_stats(x)[1]

    def _divisor(self, variance: Tensor) -> Tensor:
        return variance if self.training or self.running_var is None else self.running_var


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` that normalises to a target variance.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    Args:
        *args: those of `torch.nn.BatchNorm1d`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch"; the variable `NORMPLUG_BACKEND` overrides "auto".
        **kwargs: those of `torch.nn.BatchNorm1d`.

    Shape: (N, C) or (N, C, L), in and out. Details: `normplug.functional.batch_norm`.

    Raises:
        ValueError: an unknown mode or backend, no channels, or input of
            another dimension.
        TypeError: an argument of another type.

    Examples:
        >>> BatchNorm1d(8)
        BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, ..., mode=standard)
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that normalises to a target variance; (N, C, H, W).

    Arguments and errors are those of `BatchNorm1d`.
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` that normalises to a target variance; (N, C, D, H, W).

    Arguments and errors are those of `BatchNorm1d`.
    """


class LazyBatchNorm1d(_BatchNorm, nn.LazyBatchNorm1d):
    """`torch.nn.LazyBatchNorm1d` after a swap, until its first forward."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNorm, nn.LazyBatchNorm2d):
    """`torch.nn.LazyBatchNorm2d` after a swap, until its first forward."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNorm, nn.LazyBatchNorm3d):
    """`torch.nn.LazyBatchNorm3d` after a swap, until its first forward."""

    cls_to_become = BatchNorm3d
