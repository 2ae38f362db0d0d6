"""GroupNorm with a target variance."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from normplug import functional, native, reference
from normplug._activations import ActivationLike
from normplug._checks import as_number
from normplug._ops.call import call
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.spec import Tensors
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.watched import REFUSALS, WatchedRows, averages


class GroupNorm(WatchedRows, nn.GroupNorm):
    """`torch.nn.GroupNorm` that normalises to a target variance, and can monitor its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    The watched statistics, off by default, are scalars: moving averages of the groups' mean and of
    their biased variance. See `LayerNorm`.

    Args:
        *args: those of `torch.nn.GroupNorm`.
        mode: as in `BatchNorm1d`.
        backend: as in `BatchNorm1d`.
        track_running_stats: keep the watched statistics; None is False here.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional.group_norm`.
        **kwargs: those of `torch.nn.GroupNorm`.

    Shape: (N, C) or (N, C, *space), in and out. Details: `normplug.functional.group_norm`.

    Raises:
        ValueError: an unknown mode, backend or autocast_output, groups that do not
            divide the channels, or input with another number of channels.
        TypeError: an argument of another type.

    Examples:
        >>> GroupNorm(2, 8, mode=0.5)
        GroupNorm(2, 8, eps=1e-05, affine=True, ..., mode=0.5)
    """

    _watches = False

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, update the watched statistics if there are any."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        measures = self._probe is not None  # read first: another thread may unswap the layer
        y = self._fused(input)
        if measures:
            self._record(input, y)
        return y

    def _fused(self, input: Tensor, *, activation: ActivationLike = None) -> Tensor:
        """Compute `activation(forward(input))` in one call.

        Args:
            input: as in `forward`.
            activation: as in `normplug.functional.group_norm`.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            known = native.forward(self, input, None, None, activation)
            if known is not None:
                return known
        weight, bias = self._affine()
        own = self._normplug
        plain = activation is None and self._is_plain(input, weight)
        if plain and input.numel() > self.num_groups:
            try:
                return self._by_torch(input, weight, bias)
            except REFUSALS:
                pass
        t = Tensors(input, None, weight, bias, None, *self._statistics_to_update(input))
        spec = GroupNormSpec(
            self.num_groups,
            as_number(own.eps),
            own.target_variance,
            activation,
            functional.autocast_dtype(input),
            own.autocast_output,
            own.momentum,
        )
        y = call("functional.group_norm", t, spec, own.backend)
        if not compiling:
            native.learn(self, spec, own.backend, t, input, None, None, activation)
        return y

    def _by_torch(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The call by torch's function, if `_is_plain`."""
        groups, eps, move = self.num_groups, self._normplug.eps, self._mover()
        weight = self._scaled(weight)
        if move is None:
            cudnn = x.is_cuda and torch.backends.cudnn.enabled
            return torch.group_norm(x, groups, weight, bias, eps, cudnn)
        n, c = x.shape[0], x.shape[1]
        sizes = n, c, x.numel() // (n * c), groups
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
        move(*averages(mean, rstd, eps))
        return y

    _call_reads = (*WatchedRows._call_reads, "num_groups")
    _fusion_sites = FusionSites({"forward": forward}, after=("activation",))

    def _affine_shape(self) -> tuple[int, ...]:
        return (self.num_channels,)

    def _example_shape(self) -> tuple[int, ...]:
        return (4, self.num_channels, 2)

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        affine = self.weight, self.bias
        return reference.group_norm(x, self.num_groups, *affine, **self._numbers()).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.reshape(x.shape[0], self.num_groups, -1).var(-1, correction=0)
