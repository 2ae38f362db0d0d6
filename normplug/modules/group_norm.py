"""GroupNorm, and InstanceNorm, which is GroupNorm with one group per channel."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from normplug import reference
from normplug._activations import ActivationLike
from normplug._checks import as_number
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.spec import Tensors, autocast_dtype
from normplug._torch import NormBase
from normplug.modules.base import FusionSites, TargetVarianceNorm, forward_of_channels
from normplug.modules.frozen import Frozen
from normplug.modules.watched import WatchedRows


class _Groups(TargetVarianceNorm):
    """A norm of groups of channels."""

    forward = forward_of_channels

    def _fused(self, input: Tensor, *, activation: ActivationLike = None) -> Tensor:
        """Compute `activation(forward(input))` in one call."""
        y: Tensor = self._run(input, None, None, activation)
        return y

    _fusion_sites = FusionSites({"forward": forward}, after=("activation",))


class GroupNorm(_Groups, WatchedRows, nn.GroupNorm):
    """`torch.nn.GroupNorm` that normalises to a target variance, and can monitor its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    It takes the arguments of `torch.nn.GroupNorm` and the additional arguments of `LayerNorm`. The
    watched statistics, off by default, are scalars: moving averages of the groups' mean and of
    their biased variance.

    Shape: (N, C) or (N, C, *space), in and out. Details: `normplug.functional.group_norm`.

    Raises:
        ValueError: what `LayerNorm` refuses, groups that do not divide the channels, or input with
            another number of channels.

    Examples:
        >>> GroupNorm(2, 8, mode=0.5)
        GroupNorm(2, 8, eps=1e-05, affine=True, ..., mode=0.5)
    """

    _function = "functional.group_norm"
    _watches = False

    def _call(
        self,
        input: Tensor,
        residual: None,
        input_bias: None,
        activation: ActivationLike = None,
    ) -> tuple[Tensors, GroupNormSpec]:
        settings = self._normplug
        statistics = self._statistics_to_update(input)
        t = Tensors(input, None, *self._affine(), None, *statistics)
        spec = GroupNormSpec(
            self.num_groups,
            settings.eps,
            settings.target_variance,
            activation,
            autocast_dtype(input),
            settings.autocast_output,
            settings.momentum,
        )
        return t, spec

    _call_reads = (*WatchedRows._call_reads, "num_groups")

    def _affine_shape(self) -> tuple[int, ...]:
        return (self.num_channels,)

    def _example_shape(self) -> tuple[int, ...]:
        return (4, self.num_channels, 2)

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        return reference.group_norm(
            x, self.num_groups, self.weight, self.bias, **self._numbers()
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.reshape(x.shape[0], self.num_groups, -1).var(-1, correction=0)

    def _spread(self, vector: Tensor, y: Tensor) -> Tensor:
        return vector.reshape(-1, *[1] * (y.dim() - 2))


class _InstanceNorm(_Groups, NormBase):
    _function = "functional.instance_norm"
    _by_channel = True
    # The result of torch's method, since torch.export of torch 2.6 cannot trace a call of it.
    _no_batch_dim: ClassVar[int]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._no_batch_dim = cls._get_no_batch_dim(cls)  # type: ignore[attr-defined]

    def _fused(self, input: Tensor, *, activation: ActivationLike = None) -> Tensor:
        """Compute `activation(forward(input))` in one call."""
        y: Tensor = self._run(input, None, None, activation)
        return y if y.dim() == input.dim() else y.squeeze(0)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # Without `track_running_stats`, evaluation updates them; a frozen layer does not.
        if isinstance(self, Frozen) and not self.track_running_stats:
            return None, None, None
        return super()._statistics()

    def _is_guarded(self) -> bool:
        return self.training and self.track_running_stats

    _call_reads = (*TargetVarianceNorm._call_reads, "momentum", "track_running_stats")

    def _call(
        self,
        input: Tensor,
        residual: None,
        input_bias: None,
        activation: ActivationLike = None,
    ) -> tuple[Tensors, GroupNormSpec | BatchNormSpec]:
        """The tensors and the spec of a call: with running statistics, a BatchNorm's spec."""
        self._check_input_dim(input)
        x = self._batched(input)
        mean, var, _ = self._statistics()
        t = Tensors(x, None, *self._affine(), None, mean, var)
        eps = self._normplug.eps
        variance = self._normplug.target_variance
        if self._uses_running(self.training):
            return t, BatchNormSpec(False, 0.0, eps, variance, activation, instance=True)
        # In torch, a momentum of None leaves the statistics of an InstanceNorm unchanged.
        momentum = 0.0 if self.momentum is None else as_number(self.momentum)
        spec = GroupNormSpec(
            x.shape[1], eps, variance, activation, momentum=momentum, instance=True
        )
        return t, spec

    def _uses_running(self, training: bool) -> bool:
        return self.track_running_stats and not training

    def _batched(self, x: Tensor) -> Tensor:
        """Add the batch dimension if x lacks it, which torch's layers allow."""
        return x.unsqueeze(0) if x.dim() == self._no_batch_dim else x

    def _affine_shape(self) -> tuple[int, ...]:
        return (self.num_features,)

    def _example_shape(self) -> tuple[int, ...]:
        return (4, self.num_features, *[2] * (self._no_batch_dim - 1))

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        mean = var = None
        if self._uses_running(training):
            mean, var = self.running_mean, self.running_var
        numbers = self._numbers()
        return reference.instance_norm(
            x, self.weight, self.bias, **numbers, mean=mean, var=var
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        x = self._batched(x).to(reference.accumulator_dtype(x.dtype))
        return x.flatten(2).var(-1, correction=0)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` that normalises to a target variance.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    It takes the arguments of `torch.nn.InstanceNorm1d`, `mode` and `backend`. With
    `track_running_stats`, the running statistics are updated in training as torch's are, and used
    in evaluation.

    Shape: (N, C, L) or (C, L), in and out. Details: `normplug.functional.instance_norm`.

    Raises:
        ValueError: what `BatchNorm1d` refuses, or a single spatial position in training.

    Examples:
        >>> InstanceNorm1d(8)
        InstanceNorm1d(8, eps=1e-05, momentum=0.1, affine=False, ..., mode=standard)
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` that normalises to a target variance; (N, C, H, W) or (C, H, W).

    It takes the arguments of `InstanceNorm1d` and raises the same errors.
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` with a target variance; (N, C, D, H, W) or (C, D, H, W).

    It takes the arguments of `InstanceNorm1d` and raises the same errors.
    """
