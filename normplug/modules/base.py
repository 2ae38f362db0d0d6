"""The base class of every normplug layer, and what a norm declares."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx, nn

from normplug import _checks
from normplug._ops import likely, sharded
from normplug.modes import ModeLike, NormMode, target_variance
from normplug.modules import eps_reader
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.probe import Probe
from normplug.reference import rms_eps


class Options(NamedTuple):
    """The options of a swap; a layer uses those that its class declares in `_settings` or adopts.

    Attributes:
        target_variance: a float above 0.
        backend: as in `normplug.functional`.
        autocast_output: as in `normplug.functional.layer_norm`.
        track_running_stats: give a stock layer running statistics for monitoring; None leaves it
            to the layer's class.
        device: the device of new tensors if the layer has no weight.
    """

    target_variance: float
    backend: str = "auto"
    autocast_output: str = "float32"
    track_running_stats: bool | None = False
    device: Any = None


def eps_property(name: str) -> Any:
    """A guarded property for the eps that the stock class calls `name`: see `eps_reader`."""

    def read(layer: TargetVarianceNorm) -> float | None:
        return layer._eps if layer.target_variance == 1.0 else eps_reader.eps_to_reader(layer, name)

    def write(layer: TargetVarianceNorm, eps: float | None) -> None:
        layer._eps = vars(layer)[name] = eps

    doc = "As in the stock class; code that would drop the target variance is refused."
    return property(read, write, doc=doc)


class TargetVarianceNorm(nn.Module):
    """The base of every normplug layer: a mode, a backend, and a record of both in checkpoints.

    A norm inherits from this class and then from the stock class that it replaces. Besides its
    `forward` it declares the attributes and methods below, so that no other code knows it by name.
    `_affine_shape`, `_expected` and `_variance` have no default.
    `docs/add-a-norm.md` walks through an example.
    """

    target_variance: float
    backend: str
    # The eps that normplug's own code reads, without the cost of the guard. It is a separate
    # attribute because Dynamo of torch 2.6 and 2.11 reads `__dict__["eps"]`, not the property.
    _eps: Any  # a float; RMSNorm's may be None
    # For `_record` to fill while a `VarianceLogger` measures, else None.
    _probe: Probe | None = None

    # The names of the `Options` that each swap sets.
    _settings: ClassVar[tuple[str, ...]] = ("target_variance", "backend")
    # The names of the attributes, besides its tensors, that the result of a call depends on.
    _call_reads: ClassVar[tuple[str, ...]] = (
        "training",
        "target_variance",
        "backend",
        "_eps",
    )
    # The attributes that `extra_repr` adds to the stock class's.
    _shown: ClassVar[tuple[str, ...]] = ("mode",)
    # The operations that `fuse` may run in one call with a layer, by its `fused*` methods.
    _fusion_sites: ClassVar[FusionSites | None] = None
    # The stock class's name for its eps. A class with another name defines an `eps_property` of it.
    _eps_name: ClassVar[str] = "eps"
    # Added to the weight in the formula. `unswap` and `preserve_output` scale the sum of the two.
    _weight_offset: ClassVar[float] = 0.0
    # What the mode sets and `_variance` measures: "variance", or "second moment" if not centred.
    _measure: ClassVar[str] = "variance"
    # Its synchronised class, which `swap(sync=True)` and `SyncNorms` assign; not inherited.
    _synchronised: ClassVar[type[TargetVarianceNorm] | None] = None

    def __init__(
        self, *args: Any, mode: ModeLike = "golden", backend: str = "auto", **kwargs: Any
    ) -> None:
        caller = type(self).__name__
        _checks.layer(caller, super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)
        self.target_variance = target_variance(mode)
        _checks.backend(caller, backend)
        self.backend = backend

    def _affine_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias; also called with a stock layer as `self`."""
        raise NotImplementedError

    @classmethod
    def _refusal(cls, module: nn.Module) -> str | None:
        """Why a layer of the stock class has to stay as it is; None if a swap may convert it."""
        return None

    def _adopt(self, options: Options) -> None:
        """Give the layer what its stock class lacks, once a swap has changed its class."""

    def _likely_call(self) -> likely.Call | None:
        """How the layer will be called, as far as is known; None if it has no kernels."""
        return None

    def note_call(self, operations: likely.Operations = likely.ALONE) -> None:
        """Note how the layer will be called, so that kernels can be compiled ahead of time."""
        call = self._likely_call()
        if call is not None:
            likely.note(self, call._replace(operations=operations))

    def _leave(self) -> None:
        """Remove what `_adopt` added, before `unswap` changes the class back."""

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        """The formula in plain torch, for `check`; a subclass overrides it with its forward."""
        raise NotImplementedError

    @classmethod
    def _forward_is_expected(cls) -> bool:
        """Whether `_expected` describes this class's forward, and not only that of a base class."""
        parts = cls._fusion_sites.methods if cls._fusion_sites else ("forward",)
        return all(_depth(cls, part) >= _depth(cls, "_expected") for part in parts)

    def _example_shape(self) -> tuple[int, ...]:
        """The shape of a small input, for `check`."""
        return (8, *self._affine_shape())

    def _variance(self, x: Tensor) -> Tensor:
        """The `_measure` of each channel, row or group of x, for `VarianceLogger`."""
        raise NotImplementedError

    def _divisor(self, variance: Tensor) -> Tensor:
        """The `_measure` that an input is normalised by, given its own, for `VarianceLogger`."""
        return variance

    def may_fuse(self) -> bool:
        """Whether the fused methods would now do all that a forward does, measuring included."""
        return self._probe is None

    def waits_for_others(self) -> bool:
        """Whether a forward would now wait for other processes."""
        return False

    def stop_watching(self) -> None:
        """Remove running statistics that no result depends on, for Opacus; by default, none."""

    eps = eps_property("eps")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Older pickles have no `_eps`.
        vars(self).setdefault("_eps", vars(self).get(self._eps_name))

    @property
    def mode(self) -> NormMode:
        """The layer's mode; assign a name, a number or a `NormMode` to change it."""
        return NormMode(self.target_variance)

    @mode.setter
    def mode(self, mode: ModeLike) -> None:
        self.target_variance = target_variance(mode)

    def extra_repr(self) -> str:
        """The stock class's line, and the attributes of `_shown`."""
        shown = [f"{name}={getattr(self, name)}" for name in self._shown]
        return ", ".join(filter(None, [super().extra_repr(), *shown]))

    # Reading a tensor as a module's attribute takes the host ten times as long as from the dict.

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
        """Make one graph node of the call of the layer, as torch.fx does for torch's own layers."""
        tracer: Any = input.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"normplug: torch.jit.script cannot compile a {type(self).__name__} in mode "
            f"{self.mode}. Script normplug.unswap(model), which computes the same in stock layers, "
            "or use torch.jit.trace or torch.export."
        )

    def _record(self, x: Tensor, y: Tensor | None = None, divisor: Tensor | None = None) -> None:
        """Store what `_probe` describes; an empty x leaves it unchanged.

        y: the output after the affine. It may be None where `_variance` has a value per channel,
            as the weight does: the variance after the affine is then weight^2 times that before.
        divisor: the variance that x was normalised by, where `_divisor` cannot know it
            (a joined batch).
        """
        probe = self._probe
        assert probe is not None
        with torch.no_grad():
            x = sharded.own_part(x.detach())
            if x.numel() == 0:
                return
            # As few operations as possible: on a GPU their launches are what measuring costs.
            probe.variance = variance = self._variance(x)
            if divisor is None:
                divisor = self._divisor(variance)
            probe.divisor = None
            if divisor is not variance:
                probe.divisor = divisor.to(variance.dtype, copy=True).expand_as(variance)
            if y is not None:
                probe.output = self._variance(sharded.own_part(y.detach()))
            weight: Tensor | None = self.weight  # type: ignore[assignment]
            if weight is not None:
                weight = sharded.own_part(weight.detach())
                probe.weight = weight.to(torch.float32, copy=True)
                if self._weight_offset:
                    probe.weight += self._weight_offset
            probe.target_variance = self.target_variance
            probe.eps = rms_eps(x.dtype, self._eps)  # RMSNorm's eps may be None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["target_variance"] = self.target_variance

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # Without metadata (a plain dict, safetensors) the saved mode is unknown. Metadata without a
        # target variance comes from a stock layer.
        if local_metadata:
            saved = local_metadata.get("target_variance", 1.0)
            if saved != self.target_variance:
                warnings.warn(
                    f"normplug: a checkpoint of mode {NormMode(saved)} is loaded into layers of "
                    f"mode {self.mode}: the same weights now give other outputs. Use "
                    f"normplug.set_mode(model, {NormMode(saved).argument}) to get the saved mode "
                    "(or a mapping from paths to modes, if the saved layers differ), or load first "
                    "and then swap with preserve_output=True.",
                    stacklevel=2,
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _depth(cls: type, name: str) -> int:
    """Index in the method resolution order of the first class that defines `name`."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))
