"""Norm layers as modules: the torch classes with a target variance.

They subclass `torch.nn`'s own, with the same parameter and buffer names, so that checkpoints load,
optimizers group, and every tool that asks `isinstance(module, nn.BatchNorm2d)` still knows them.
Beyond that they add plain attributes only: a stock layer becomes one, and stock again, by
assignment of `__class__` (see `normplug._convert`).
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from normplug import _checks, _guards, _sync, functional
from normplug._ops import nested
from normplug._ops.aten import Pool
from normplug.modes import ModeLike, NormMode, target_variance
from normplug.reference import accumulator_dtype

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "SyncBatchNorm"]

# LayerNorm's running statistics, and what each is before the first batch.
_START = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
LAYER_NORM_STATISTICS = tuple(_START)


class TargetVarianceNorm(nn.Module):
    """What every normplug layer has: a mode, a backend, and a record of both in checkpoints."""

    target_variance: float
    backend: str
    # What `eps` is, for normplug's own code. Dynamo of torch 2.6 and 2.11 reads `__dict__["eps"]`
    # through the property, so it needs an attribute of its own.
    _eps: float
    # A (4,) float32 tensor while a `VarianceLogger` listens; the class attribute means no layer
    # carries anything for it otherwise.
    _probe: Tensor | None = None

    @property
    def eps(self) -> float:
        """As the torch class's; code that would drop the target variance is refused."""
        return self._eps if self.target_variance == 1.0 else _guards.eps_to_reader(self)

    @eps.setter
    def eps(self, eps: float) -> None:
        self._eps = self.__dict__["eps"] = eps

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A layer that was pickled before it had `_eps`.
        vars(self).setdefault("_eps", vars(self).get("eps"))

    @property
    def mode(self) -> NormMode:
        """The layer's mode; assign any spelling of one to change it."""
        return NormMode(self.target_variance)

    @mode.setter
    def mode(self, mode: ModeLike) -> None:
        self.target_variance = target_variance(mode)

    def extra_repr(self) -> str:
        """The torch class's line, and the mode."""
        return f"{super().extra_repr()}, mode={self.mode}"

    def computes_only(self) -> bool:
        """Whether a forward now is a computation: nothing measures it, no other process joins."""
        return self._probe is None

    # Asking for a tensor as an attribute takes the host ten times as long as asking its dict.

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias."""
        own = self._parameters
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]
        return self.weight, self.bias  # type: ignore[return-value]  # parametrized, or sharded

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Running mean, running variance and num_batches_tracked."""
        own = self._buffers
        if "running_mean" in own and "running_var" in own and "num_batches_tracked" in own:
            return own["running_mean"], own["running_var"], own["num_batches_tracked"]
        return self.running_mean, self.running_var, self.num_batches_tracked  # type: ignore[return-value]

    def _as_leaf(self, input: fx.Proxy) -> Tensor:
        """The call of the layer as one node of a graph, as torch.fx makes of torch's own layers."""
        tracer: Any = input.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"normplug: torch.jit.script cannot compile a {type(self).__name__} in mode "
            f"{self.mode}. Script normplug.unswap(model), the same function in torch.nn layers, or "
            "use torch.jit.trace or torch.export."
        )

    def _record(self, x: Tensor, y: Tensor, *statistics: Tensor) -> None:
        """Fill `_probe`: variance of x, of the output before the affine, after it; weight RMS.

        statistics: what x was normalised by, where the layer cannot tell from x.
        """
        assert self._probe is not None
        with torch.no_grad():
            x, y = x.detach(), y.detach()
            plain = self._without_affine(x, *statistics)
            values = [self._variance(z).float() for z in (x, plain, y)]
            weight: Tensor | None = self.weight  # type: ignore[assignment]
            ones = torch.ones_like(values[0])
            values.append(ones if weight is None else weight.float().square().mean().sqrt())
            self._probe.copy_(torch.stack(values))

    def _variance(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _without_affine(self, x: Tensor, *statistics: Tensor) -> Tensor:
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["target_variance"] = self.target_variance

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # No metadata at all (a plain dict, safetensors) says nothing of the mode; metadata without
        # a target variance is a stock layer's.
        if local_metadata:
            saved = local_metadata.get("target_variance", 1.0)
            if saved != self.target_variance:
                warnings.warn(
                    f"normplug: a checkpoint of mode {NormMode(saved)} is loaded into layers of "
                    f"mode {self.mode}: the same weights now give another function. Use "
                    f"normplug.set_mode(model, {NormMode(saved).argument}) for the saved one, or "
                    "load first and then swap with preserve_output=True.",
                    stacklevel=2,
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class _BatchNormForward(TargetVarianceNorm, nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, move the running statistics."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        y = self.fused(input)
        if self._probe is not None:
            self._record(input, y)
        return y

    def fused(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        activation: str | None = None,
        pool: Pool | None = None,
        *,
        lone: bool = False,
        keeps_residual: bool = False,
    ) -> Tensor:
        """What `forward` computes, plus `residual`, through `activation`, in one call.

        Args:
            input: as in `forward`.
            residual: as in `normplug.functional.batch_norm`.
            activation: as in `normplug.functional.batch_norm`.
            pool: max pooling after relu, without a residual.
            lone: whether a compiler would have nothing to fuse it with.
            keeps_residual: for the backward, so that the kernels' result can be recomputed.
        """
        self._check_input_dim(input)
        weight, bias = self._affine()
        mean, var, tracked = self._statistics()
        training = self.training or (mean is None and var is None)
        if self.training and not self.track_running_stats:
            mean = var = None
        arguments = (
            input,
            mean,
            var,
            weight,
            bias,
            training,
            # A layer without its counter (a checkpoint of torch < 0.4.1) averages nothing.
            0.0 if self.momentum is None and tracked is None else self.momentum,
            self._eps,
        )
        if pool is not None:
            assert activation == "relu"
            assert residual is None
            return functional._batch_norm_max_pool(
                *arguments,
                mode=self.target_variance,
                pool=pool,
                num_batches_tracked=tracked,
                backend=self.backend,
            )
        return functional._fused_batch_norm(
            *arguments,
            mode=self.target_variance,
            residual=residual,
            activation=activation,
            num_batches_tracked=tracked,
            backend=self.backend,
            lone=lone,
            keeps_residual=keeps_residual,
        )

    def _variance(self, x: Tensor) -> Tensor:
        return functional.channel_stats(x)[1].mean()

    def _without_affine(self, x: Tensor, *statistics: Tensor) -> Tensor:
        training = self.training or self.running_mean is None
        own = (None, None) if training else (self.running_mean, self.running_var)
        mean, var = statistics or own
        return functional.batch_norm(
            x,
            mean,
            var,
            training=mean is None,
            eps=self._eps,
            mode=self.target_variance,
            backend=self.backend,
        )


class _BatchNorm(_BatchNormForward):
    def __init__(
        self, *args: Any, mode: ModeLike = "golden", backend: str = "auto", **kwargs: Any
    ) -> None:
        who = type(self).__name__
        _checks.layer(who, super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)
        self.target_variance = target_variance(mode)
        _checks.backend(who, backend)
        self.backend = backend


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` that normalises to a target variance.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    Args:
        *args: those of `torch.nn.BatchNorm1d`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch"; the environment's `NORMPLUG_BACKEND` sets "auto".
        **kwargs: those of `torch.nn.BatchNorm1d`.

    Shape: (N, C) or (N, C, L), in and out. Details: `normplug.functional.batch_norm`.

    Raises:
        ValueError: an unknown mode or backend, an eps of 0 or below, no channels, or input of
            another dimension.
        TypeError: an argument of another type.

    Example:
        >>> BatchNorm1d(8)
        BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, ..., mode=golden)
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that normalises to a target variance; (N, C, H, W).

    Arguments and errors as `BatchNorm1d`'s.
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` that normalises to a target variance; (N, C, D, H, W).

    Arguments and errors as `BatchNorm1d`'s.
    """


class _SyncBatchNormForward(_BatchNormForward):
    process_group: Any
    # What the layer was before it was synchronised, and what input it still takes.
    _unsynced_class: type[Any] = nn.SyncBatchNorm

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, with the other processes, and move the statistics."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        group = self.group_to_join()
        if group is None:
            return super().forward(input)
        self._check_input_dim(input)
        tracked = self.track_running_stats
        y, mean, var = _sync.batch_norm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            self.num_batches_tracked if tracked else None,
            # As in `_BatchNormForward`.
            0.0 if self.momentum is None and self.num_batches_tracked is None else self.momentum,
            self._eps,
            self.target_variance,
            self.backend,
            group,
        )
        if self._probe is not None:
            self._record(input, y, mean, var)
        return y

    def group_to_join(self) -> Any:
        """The process group of the next forward; None where it takes this process's batch only."""
        return _sync.group_to_join(self.process_group) if self.training else None

    def computes_only(self) -> bool:
        """As every layer's; in training, in one process."""
        return super().computes_only() and self.group_to_join() is None

    def _check_input_dim(self, input: Tensor) -> None:
        self._unsynced_class._check_input_dim(self, input)


class SyncBatchNorm(_SyncBatchNormForward, _BatchNorm, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that normalises to a target variance, on CPU tensors as well.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    In training, mean and var are those of the joined batch of all processes of the group, and so
    are the gradients and the running statistics. The processes' batches may differ in size, and
    some may be empty; each process must call the layers in the same order. One message is sent
    forward and one backward, and every process gets the same statistics, bit for bit. The
    gradients of weight and bias are sums over the process's own batch, which
    `DistributedDataParallel` averages, as with torch's. In eval, in one process, or where no
    process group is initialised, it is `BatchNorm1d` and its kin, and sends nothing.

    Under CUDA the host never waits, and so cannot refuse a joined batch of one value a channel:
    its output is the bias, and the running statistics stay.

    `DistributedDataParallel` refuses to wrap any `torch.nn.SyncBatchNorm` on the CPU. There, wrap
    first and then `normplug.swap(model, mode, sync=True)`.

    Args:
        *args: those of `torch.nn.SyncBatchNorm`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch", as in `BatchNorm1d`; what is summed for the gradients
            in several processes is always torch's.
        **kwargs: those of `torch.nn.SyncBatchNorm`; `process_group` None is all processes.

    Shape: (N, C) or (N, C, *space), in and out. One that a swap made of a `BatchNorm2d` takes what
    that took. Differentiable twice, if all processes do it.

    Raises:
        ValueError: an unknown mode or backend, input of another dimension, and on the CPU one value
            a channel in the joined batch.

    Example:
        >>> SyncBatchNorm(8, mode="standard")(torch.ones(2, 8)).sum()
        tensor(0., grad_fn=<SumBackward0>)
    """


class LazyBatchNorm1d(_BatchNormForward, nn.LazyBatchNorm1d):
    """What a swap makes of `torch.nn.LazyBatchNorm1d`, until its first forward."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNormForward, nn.LazyBatchNorm2d):
    """What a swap makes of `torch.nn.LazyBatchNorm2d`, until its first forward."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNormForward, nn.LazyBatchNorm3d):
    """What a swap makes of `torch.nn.LazyBatchNorm3d`, until its first forward."""

    cls_to_become = BatchNorm3d


class LazySyncBatchNorm(
    _SyncBatchNormForward, nn.modules.batchnorm._LazyNormBase, nn.modules.batchnorm._BatchNorm
):
    """What `swap(sync=True)` makes of `torch.nn.LazyBatchNorm*d`, until its first forward."""

    cls_to_become = SyncBatchNorm


class LayerNorm(TargetVarianceNorm, nn.LayerNorm):
    """`torch.nn.LayerNorm` that normalises to a target variance and watches its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    The running statistics are scalars: moving averages of the rows' mean and of their biased
    variance. They are saved, and no result depends on them. They start again, with mean 0 and
    variance 1, where a checkpoint without them is loaded, which a strict load forgives, and where
    the layer leaves the meta device. Inside `torch.func` transforms they stand still.

    Args:
        *args: those of `torch.nn.LayerNorm`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch"; the environment's `NORMPLUG_BACKEND` sets "auto".
        track_running_stats: carry the running statistics.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional.layer_norm`.
        **kwargs: those of `torch.nn.LayerNorm`.

    Shape: (*rows, *normalized_shape), in and out. Details: `normplug.functional.layer_norm`.

    Raises:
        ValueError: an unknown mode, backend or autocast_output, an eps below 0, an empty row, or
            input of another trailing shape.
        TypeError: an argument of another type.

    Example:
        >>> LayerNorm(8, mode=0.5)
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, ..., mode=0.5)
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    _channels_first = False  # whether what it normalises is a view of images that are

    def __init__(
        self,
        *args: Any,
        mode: ModeLike = "golden",
        backend: str = "auto",
        track_running_stats: bool = True,
        momentum: float | None = 0.1,
        autocast_output: str = "float32",
        **kwargs: Any,
    ) -> None:
        who = "LayerNorm"
        _checks.layer(who, super().__init__, args, kwargs)
        _checks.momentum(who, momentum, None, moves=False)
        _checks.flags(who, track_running_stats=track_running_stats)
        super().__init__(*args, **kwargs)
        self.target_variance = target_variance(mode)
        _checks.backend(who, backend)
        self.backend = backend
        _checks.autocast_output(who, autocast_output)
        self.autocast_output = autocast_output
        self.track_running_stats = track_running_stats
        self.momentum = momentum
        self.register_statistics(
            kwargs.get("device") if self.weight is None else self.weight.device
        )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, move the running statistics."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        return self._normalise(input, *self._affine(), self.autocast_output)

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        y = functional._layer_norm(
            input,
            self.normalized_shape,
            weight,
            bias,
            autocast_output=autocast_output,
            channels_first=self._channels_first,
            **self._options(input),
        )
        if self._probe is not None:
            self._record(*(nested.rows(t, self.normalized_shape) for t in (input, y)))
        return y

    def fused(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` makes of input + residual, and that sum, in one call.

        Args:
            input: as in `forward`.
            residual: as in `normplug.functional.add_layer_norm`.
        """
        return functional.add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            *self._affine(),
            autocast_output=self.autocast_output,
            **self._options(input),
        )

    def fused_bias(self, input: Tensor, input_bias: Tensor) -> Tensor:
        """What `forward` makes of input + input_bias, in one call.

        Args:
            input: as in `forward`.
            input_bias: as in `normplug.functional.layer_norm`.
        """
        return functional.layer_norm(
            input,
            self.normalized_shape,
            *self._affine(),
            input_bias=input_bias,
            autocast_output=self.autocast_output,
            **self._options(input),
        )

    def _options(self, input: Tensor) -> dict[str, Any]:
        """What the functions are told beside their tensors, and the statistics that they move."""
        mean, var, tracked = self._statistics_to_move(input)
        return {
            "eps": self._eps,
            "mode": self.target_variance,
            "running_mean": mean,
            "running_var": var,
            "num_batches_tracked": tracked,
            "momentum": self.momentum,
            "backend": self.backend,
        }

    def _statistics_to_move(
        self, input: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The running statistics, where `input` is; Nones where a forward leaves them alone."""
        statistics = self._statistics() if self.training else (None, None, None)
        mean = statistics[0]
        # torch.func transforms refuse writes to captured tensors, and stock LayerNorm has none.
        if mean is None or torch._C._are_functorch_transforms_active():
            return None, None, None
        try:
            device = input.device
        except AttributeError:  # no tensor, and about to be refused
            return statistics
        if mean.device != device:
            # Without weight and bias nothing told the layer where its inputs live.
            self._move_statistics(device)
            return self._statistics()
        return statistics

    def reset_parameters(self) -> None:
        """As the torch class, and forget the running statistics."""
        super().reset_parameters()
        if "running_mean" in self._buffers:  # the torch constructor calls this before there are any
            self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forget what was watched: mean 0, variance 1, no batches."""
        if self._lacks_values():
            parameter = next(self.parameters(), None)
            self._start_on("cpu" if parameter is None else parameter.device)
            return
        for name, start in _START.items():
            if (buffer := getattr(self, name)) is not None:
                buffer.fill_(start)

    def extra_repr(self) -> str:
        """The torch class's line, the statistics' settings, and the mode."""
        line, mode = super().extra_repr().rsplit(", ", 1)
        track, momentum = self.track_running_stats, self.momentum
        return f"{line}, momentum={momentum}, track_running_stats={track}, {mode}"

    def register_statistics(self, device: Any = None) -> None:
        """Give the layer fresh running statistics, or None in their place where it tracks none."""
        double = self.weight is not None and self.weight.dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        for name, start in _START.items():
            value = None
            if self.track_running_stats:
                kind = torch.long if name == "num_batches_tracked" else dtype
                with torch.inference_mode(False):  # they are written to in training
                    value = torch.full((), start, device=device, dtype=kind)
            self.register_buffer(name, value)

    def _move_statistics(self, device: torch.device) -> None:
        if self._lacks_values():
            self._start_on(device)
            return
        with torch.inference_mode(False):
            for name in LAYER_NORM_STATISTICS:
                if (buffer := getattr(self, name)) is not None:
                    setattr(self, name, buffer.to(device))

    def _lacks_values(self) -> bool:
        """Whether the statistics are on the meta device still, and no parameter is."""
        mean = self._buffers.get("running_mean")
        if mean is None or not mean.is_meta:
            return False
        parameter = next(self.parameters(), None)  # asking for `weight` may compute it
        return parameter is None or not parameter.is_meta

    def _start_on(self, device: torch.device | str) -> None:
        """Put fresh running statistics on a device, in place of those that have no values."""
        with torch.inference_mode(False):
            for name, start in _START.items():
                if (buffer := getattr(self, name)) is not None:
                    fresh = torch.full((), start, dtype=buffer.dtype, device=device)
                    setattr(self, name, fresh)

    def _apply(self, fn: Any, recurse: bool = True) -> LayerNorm:
        # The meta device holds no values, and `to_empty` gives none: what leaves it starts fresh.
        on_meta = self._is_on_meta()
        if self._lacks_values():
            self.reset_running_stats()
        super()._apply(fn, recurse)
        if on_meta and not self._is_on_meta():
            self.reset_running_stats()
        return self

    def _is_on_meta(self) -> bool:
        tensors = (next(self.parameters(), None), self._buffers.get("running_mean"))
        return any(t is not None and t.is_meta for t in tensors)

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(accumulator_dtype(x.dtype))
        dims = tuple(range(-len(self.normalized_shape), 0))
        return x.var(dims, correction=0).mean()

    def _without_affine(self, x: Tensor, *statistics: Tensor) -> Tensor:
        return functional.layer_norm(
            x,
            self.normalized_shape,
            eps=self._eps,
            mode=self.target_variance,
            backend=self.backend,
        )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing, unexpected = list[str](), list[str]()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs
        )
        # The statistics are only watched: a checkpoint may lack them, or have them for nobody.
        watched = {prefix + name for name in LAYER_NORM_STATISTICS}
        missing_keys += [key for key in missing if key not in watched]
        unexpected_keys += [key for key in unexpected if key not in watched]
        # With other parameters, what was watched is no longer that of this layer.
        own = {prefix + name for name, value in self._parameters.items() if value is not None}
        replaced = own and own.issubset(state_dict) and watched.isdisjoint(state_dict)
        if replaced or self._lacks_values():
            self.reset_running_stats()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # A tool that sets each parameter by itself, as accelerate does, tells the layer nothing.
        others = chain(self.parameters(), destination.values())
        if self._lacks_values() and any(not getattr(t, "is_meta", True) for t in others):
            self.reset_running_stats()
        super()._save_to_state_dict(destination, prefix, keep_vars)
