"""InstanceNorm layers with a target variance."""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from normplug import native, reference
from normplug._activations import ActivationLike
from normplug._checks import as_number
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.call import call
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.spec import Tensors
from normplug._torch import InstanceNormBase
from normplug.modules.base import TargetVarianceNorm
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.watched import REFUSALS


class _InstanceNorm(TargetVarianceNorm, InstanceNormBase):
    # The result of torch's method, since torch.export of torch 2.6 cannot trace a call of it.
    _no_batch_dim: ClassVar[int]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._no_batch_dim = cls._get_no_batch_dim(cls)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, update the running statistics if there are any."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        measures = self._probe is not None  # read first: another thread may unswap the layer
        y = self._fused(input)
        if measures:
            self._record(self._batched(input), self._batched(y))
        return y

    def _fused(self, input: Tensor, *, activation: ActivationLike = None) -> Tensor:
        """Compute `activation(forward(input))` in one call.

        Args:
            input: as in `forward`.
            activation: as in `normplug.functional.instance_norm`.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            known = native.forward(self, input, None, None, activation)
            if known is not None:
                return known
        self._check_input_dim(input)
        x = self._batched(input)
        self._check_channels(x.shape[1])
        weight, bias = self._affine()
        mean, var, _ = self._statistics()
        y = self._by_torch(x, weight, bias, mean, var) if activation is None else None
        if y is not None:
            return y if x is input else y.squeeze(0)
        t = Tensors(x, None, weight, bias, None, mean, var)
        spec = self._spec(x.shape[1], activation)
        backend = self._normplug.backend
        y = call("functional.instance_norm", t, spec, backend)
        if not compiling:
            native.learn(self, spec, backend, t, input, None, None, activation)
        return y if x is input else y.squeeze(0)

    def _by_torch(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
    ) -> Tensor | None:
        """The call by torch's function; None if it takes a kernel, or more than the function."""
        of_batch, momentum = not self._uses_running(self.training), self.momentum
        if (
            not self._runs_torch(x, weight)
            or not (momentum is None or type(momentum) is float)
            or min(x.shape) < 2  # as in BatchNorm
        ):
            return None
        cudnn = x.is_cuda and torch.backends.cudnn.enabled
        numbers = (of_batch, momentum or 0.0, self._normplug.eps, cudnn)
        try:
            return torch.instance_norm(x, self._scaled(weight), bias, mean, var, *numbers)
        except REFUSALS:
            return None

    _call_reads = (*TargetVarianceNorm._call_reads, "momentum", "track_running_stats")
    _fusion_sites = FusionSites({"forward": forward}, after=("activation",))

    def _spec(self, channels: int, activation: ActivationLike) -> GroupNormSpec | BatchNormSpec:
        """The spec of a call: that of a BatchNorm in evaluation with running statistics."""
        eps, tv = self._eps, self.target_variance
        if self._uses_running(self.training):
            return BatchNormSpec(False, 0.0, eps, tv, activation, instance=True)
        # In torch, a momentum of None leaves the statistics of an InstanceNorm unchanged.
        momentum = 0.0 if self.momentum is None else as_number(self.momentum)
        return GroupNormSpec(channels, eps, tv, activation, momentum=momentum, instance=True)

    def _uses_running(self, training: bool) -> bool:
        return self.track_running_stats and not training

    def _batched(self, x: Tensor) -> Tensor:
        """Add the batch dimension if x lacks it, which torch's layers allow."""
        return x.unsqueeze(0) if x.dim() == self._no_batch_dim else x

    def _check_channels(self, channels: int) -> None:
        """Warn if the number of channels differs from `num_features`, as torch does."""
        if self.num_features == 0:  # torch's lazy layer never sets it without parameters
            self.num_features = channels
        elif channels != self.num_features and not self.affine:
            warnings.warn(
                f"normplug.{type(self).__name__}: num_features is {self.num_features}, but the "
                f"input has {channels} channels. Without weight and bias that has no effect; "
                "correct num_features to avoid this warning.",
                stacklevel=6,
            )

    def _affine_shape(self) -> tuple[int, ...]:
        return (self.num_features,)

    def _example_shape(self) -> tuple[int, ...]:
        return (4, self.num_features, *[2] * (self._no_batch_dim - 1))

    def _constants(self, training: bool) -> tuple[Tensor | None, Tensor | None]:
        """The running mean and variance if the layer normalises by them, else Nones."""
        if self._uses_running(training):
            return self.running_mean, self.running_var
        return None, None

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        mean, var = self._constants(training)
        affine = self.weight, self.bias
        return reference.instance_norm(x, *affine, **self._numbers(), mean=mean, var=var).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.flatten(2).var(-1, correction=0)

    def _divisor(self, variance: Tensor) -> Tensor:
        constant = self._constants(self.training)[1]
        return variance if constant is None else constant


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` that normalises to a target variance.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    With `track_running_stats`, the running statistics are updated in training as torch's are, and
    used in evaluation.

    Args:
        *args: those of `torch.nn.InstanceNorm1d`.
        mode: as in `BatchNorm1d`.
        backend: as in `BatchNorm1d`.
        **kwargs: those of `torch.nn.InstanceNorm1d`.

    Shape: (N, C, L) or (C, L), in and out. Details: `normplug.functional.instance_norm`.

    Raises:
        ValueError: an unknown mode or backend, no channels, a single spatial position in training,
            or input of another dimension.
        TypeError: an argument of another type.

    Examples:
        >>> InstanceNorm1d(8)
        InstanceNorm1d(8, eps=1e-05, momentum=0.1, affine=False, ..., mode=standard)
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` that normalises to a target variance; (N, C, H, W) or (C, H, W).

    Arguments and errors are those of `InstanceNorm1d`.
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` with a target variance; (N, C, D, H, W) or (C, D, H, W).

    Arguments and errors are those of `InstanceNorm1d`.
    """


class LazyInstanceNorm1d(_InstanceNorm, nn.LazyInstanceNorm1d):
    """`torch.nn.LazyInstanceNorm1d` after a swap, until its first forward."""

    cls_to_become = InstanceNorm1d


class LazyInstanceNorm2d(_InstanceNorm, nn.LazyInstanceNorm2d):
    """`torch.nn.LazyInstanceNorm2d` after a swap, until its first forward."""

    cls_to_become = InstanceNorm2d


class LazyInstanceNorm3d(_InstanceNorm, nn.LazyInstanceNorm3d):
    """`torch.nn.LazyInstanceNorm3d` after a swap, until its first forward."""

    cls_to_become = InstanceNorm3d
