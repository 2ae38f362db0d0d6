"""The base class of every normplug layer: its settings, its eps, and what a norm declares."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable
from importlib import import_module
from types import FrameType, FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx, nn

from normplug import _checks, native
from normplug._choices import Backend
from normplug._ops import can_run, subclasses, torch_way
from normplug._ops.call import call
from normplug._ops.spec import Tensors
from normplug.modes import ModeLike, NormMode
from normplug.modes import target_variance as variance_of
from normplug.modules.probe import (
    Measured,
    Probe,
    is_copied,
    is_only_measured,
    without_probe,
)
from normplug.modules.table import name_of, restore
from normplug.reference import accumulator_dtype

# The properties of every layer that a user may assign; its eps is another.
_SETTINGS = frozenset(
    ("mode", "target_variance", "backend", "autocast_output", "statistics")
)


class Settings(NamedTuple):
    """The settings that normplug stores in a layer, as one attribute: `_normplug`."""

    target_variance: float = 1.0
    backend: str = "auto"
    autocast_output: str = "float32"
    eps: Any = None  # a number; RMSNorm's may be None. The layer may show a `HiddenEps`.
    momentum: float | None = 0.1  # of statistics that are only watched
    # Of a synchronised layer: its stock class before, and whether it had that class.
    unsynced_class: type[nn.Module] | None = None
    statistics: str = "torch"  # or "safe", for running statistics that evaluation uses
    watches: bool = False  # statistics that are only watched, in a compiled step too
    was_stock: bool = False  # see `unsynced_class`
    by_run: bool = False  # `python -m normplug run` has swapped the layer


def _setting(name: str) -> Any:
    """A property for one of the `Settings`, which a user may assign."""

    def read(layer: TargetVarianceNorm) -> Any:
        return getattr(layer._normplug, name)

    def write(layer: TargetVarianceNorm, value: Any) -> None:
        _checks.option(type(layer).__name__, name, value)
        layer._set(**{name: value})

    return property(read, write, doc=f"The `{name}` of `normplug.functional`.")


class HiddenEps(float):
    """An eps whose text is the true eps and whose value is nan.

    Tools that fold, rebuild or recompute a norm read its eps and drop the target variance: every
    output would be scaled by 1/sqrt(tv). So a layer whose target variance is not 1 shows this eps.

    reader                             what it gets   so that
    ---------------------------------  -------------  -----------------------------------
    print, str, format, repr(layer)    the true eps   people see it
    fuse_conv_bn_eval, timm's tools    nan            the mistake shows: outputs are nan
    a rebuilt layer, a stock forward   nan            the same, and `check` names the layer
    TransformerEncoderLayer            no two equal   it calls the norms, not its fast path
    TransformerEncoder itself          the true eps   it removes padding, as without a swap
    Dynamo, torch.export               a plain nan    they can trace it
    torch.utils.mkldnn.to_mkldnn       an error       oneDNN's relu does not turn nan into 0
    """

    true: float | None  # None is an RMSNorm's default

    def __new__(cls, true: float | None) -> HiddenEps:
        """Hide an eps."""
        self = super().__new__(cls, math.nan)
        self.true = true
        return self

    def __repr__(self) -> str:
        return repr(self.true)

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        if _asked_by_transformer_encoder(sys._getframe(1)):
            return self.true == (other.true if isinstance(other, HiddenEps) else other)
        return False

    def __ne__(self, other: object) -> bool:
        if _asked_by_transformer_encoder(sys._getframe(1)):
            return self.true != (other.true if isinstance(other, HiddenEps) else other)
        return True

    __hash__ = float.__hash__

    def __format__(self, spec: str) -> str:
        return format(self.true, spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return HiddenEps, (self.true,)


def _asked_by_transformer_encoder(reader: FrameType) -> bool:
    """Whether `nn.TransformerEncoder` compares, to see if its layers can take nested tensors.

    Its layers compare the same two values, to see if their fast path may run.
    """
    methods = nn.TransformerEncoder.__init__, nn.TransformerEncoder.forward
    return any(reader.f_code is getattr(method, "__code__", None) for method in methods)


def eps_property(name: str) -> Any:
    """The property for the eps that the stock class calls `name`."""

    def read(layer: Any) -> Any:
        settings = layer._normplug
        if settings.target_variance == 1.0:
            return settings.eps
        if torch.compiler.is_dynamo_compiling():
            return math.nan
        if _is_read_by_mkldnn():
            raise NotImplementedError(
                "normplug: torch.utils.mkldnn.to_mkldnn would drop the target variance of a "
                f"{type(layer).__name__} in mode {layer.mode}. Call normplug.unswap(model) first."
            )
        return HiddenEps(settings.eps)

    def write(layer: Any, eps: Any) -> None:
        layer._set(eps=eps.true if isinstance(eps, HiddenEps) else _checks.as_number(eps))

    doc = "The eps of the stock layer, or a `HiddenEps` if the target variance is not 1."
    return property(read, write, doc=doc)


def _is_read_by_mkldnn() -> bool:
    """Whether `torch.utils.mkldnn` reads the property that calls this."""
    reader = sys._getframe(1).f_back
    return reader is not None and reader.f_globals["__name__"] == "torch.utils.mkldnn"


class FusionSites(NamedTuple):
    """The operations that `normplug.fuse` may run in one call with a layer: `_fusion_sites`."""

    # The methods of the forward, by name. A subclass that overrides one of them is not fused.
    methods: dict[str, Callable[..., Any]]
    # What `_fused` runs after the layer: any of "activation", "addition" (of a residual, before the
    # activation), "max_pool" (after relu), "modulation" (a scale and a shift of each sample or
    # token, by `_fused_modulation`); and "norm": `_fused_norms` runs a layer of the same kind,
    # whose result is added.
    after: tuple[str, ...] = ()
    # What runs before it: "sum" (of two tensors, by `_fused_add`), and "convolution_bias" (by
    # `_fused_bias`, for layers with a `normalized_shape`).
    before: tuple[str, ...] = ()


class TargetVarianceNorm(nn.Module):
    """The base of every normplug layer: a mode, a backend, and a record of both in checkpoints.

    A norm inherits from this class and then from the stock class that it replaces. Besides its
    `forward` it declares what this class lists in code, so that no other code depends on its
    name. `docs/add-a-norm.md` walks through an example.
    """

    # Of the attributes that normplug adds, the result of a call depends on this one only.
    _normplug: Settings = Settings()
    # `_record` fills it while `normplug.watch` or a `VarianceLogger` measures; else it is None.
    _probe: Probe | None = None

    # What the result of a call depends on besides weight and bias, by name: three buffers, which
    # are the statistics, and then attributes.
    _call_reads: ClassVar[tuple[str, ...]] = (
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "training",
        "_normplug",
    )
    # What `plan` says of a layer that would get this class.
    _note: ClassVar[str] = ""
    # The names of weight and bias.
    _affine_names: ClassVar[tuple[str, str]] = ("weight", "bias")
    # The function that computes the forward, such as "functional.layer_norm", for errors.
    _function: ClassVar[str]
    # The operations that `fuse` may run in one call with a layer, by its `_fused*` methods.
    _fusion_sites: ClassVar[FusionSites | None] = None
    # The stock class's name for its eps. Another name than "eps" needs an `eps_property`.
    _eps_name: ClassVar[str] = "eps"
    # Added to the weight in the formula. `unswap` and `preserve_output` scale the sum of the two.
    _weight_offset: ClassVar[float] = 0.0
    # What the mode sets and `_variance` measures: "variance", or "second moment" if not centred.
    _measure: ClassVar[str] = "variance"
    # Whether each value of `_variance` is of one channel, with one weight and one bias.
    _by_channel: ClassVar[bool] = False
    # Its synchronised class, which `swap(sync=True)` and `SyncNorms` assign; not inherited.
    _synchronised: ClassVar[type[TargetVarianceNorm] | None] = None

    def __init__(
        self,
        *args: Any,
        mode: ModeLike = "standard",
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        caller = type(self).__name__
        _checks.layer(caller, super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)
        self.backend = backend
        self.target_variance = mode

    backend = _setting("backend")
    autocast_output = _setting("autocast_output")
    statistics = _setting("statistics")
    eps = eps_property("eps")

    @property
    def target_variance(self) -> float:
        """The variance that the layer normalises to."""
        return self._normplug.target_variance

    @target_variance.setter
    def target_variance(self, mode: ModeLike) -> None:
        self._set(target_variance=variance_of(mode))

    @property
    def mode(self) -> NormMode:
        """The layer's mode; assign a name, a number or a `NormMode` to change it."""
        return NormMode(self.target_variance)

    @mode.setter
    def mode(self, mode: ModeLike | None) -> None:
        if mode is not None:  # tools that replace a forward, such as Liger, set None
            self.target_variance = mode

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a parameter or a module under the name of a setting, and never
        # call the property, which checks the value.
        is_setting = name in _SETTINGS or name == self._eps_name
        if is_setting and isinstance(value, (Tensor, nn.Module)):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _set(self, **changes: Any) -> None:
        """Change settings, and the eps that the layer shows."""
        own = vars(self)
        own["_normplug"] = settings = self._normplug._replace(**changes)
        plain = settings.target_variance == 1.0
        own[self._eps_name] = settings.eps if plain else HiddenEps(settings.eps)

    def _affine_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias; also called with a stock layer as `self`."""
        raise NotImplementedError

    @classmethod
    def _refusal(cls, module: nn.Module) -> str | None:
        """Why a layer of the stock class must stay stock; None if a swap may convert it."""
        return None

    @classmethod
    def _adopt(
        cls, module: nn.Module, track_running_stats: bool | None, device: Any
    ) -> None:
        """Give a stock layer what its class lacks, before a swap changes the class.

        device: the device of new tensors if the layer has no weight.
        """

    @classmethod
    def _leave(cls, module: nn.Module) -> None:
        """Remove what `_adopt` added, after `unswap` has changed the class back, or for Opacus."""

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        """The formula in plain torch, for `check`; a class with another forward overrides it."""
        raise NotImplementedError

    def _example_shape(self) -> tuple[int, ...]:
        """The shape of a small input, for `check`."""
        return (8, *self._affine_shape())

    def _variance(self, x: Tensor) -> Tensor:
        """The `_measure` of each channel, row or group of x, for `normplug.watch`."""
        raise NotImplementedError

    def _plain_variance(self, y: Tensor, weight: Tensor) -> Tensor:
        """The `_variance` of the output y with weight and bias undone."""
        bias: Tensor | None = getattr(self, "bias", None)
        plain = y.to(accumulator_dtype(y.dtype))
        if bias is not None:
            plain = plain - self._spread(subclasses.own_part(bias.detach()), y)
        return self._variance(plain / self._spread(weight, y))

    def _spread(self, vector: Tensor, y: Tensor) -> Tensor:
        """A weight or bias, in a shape that broadcasts to y."""
        return vector

    def group_to_join(self) -> Any:
        """The process group whose batches a forward would now join; None if there is none."""
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy is not measured, even if the layer is.
        super().__setstate__(
            {name: value for name, value in state.items() if name != "_probe"}
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the stock class, which can be imported: see `modules.table`."""
        if is_only_measured(self):
            # Protocols above 1 refuse a class other than the layer's.
            return without_probe(self).__reduce_ex__(1)
        if self.is_stock_in_files() and not is_copied():
            return self._stock_twin().__reduce_ex__(1)
        made: Any = super().__reduce_ex__(2)
        make, args, *rest = made
        if args != (type(self),):  # a frozen layer, or a library's own way
            return made
        return (restore, name_of(type(self)), *rest)

    def is_stock_in_files(self) -> bool:
        """Whether files get the stock layer, because the program that writes them is stock."""
        return self._normplug.by_run and self.target_variance == 1.0

    def _stock_twin(self) -> nn.Module:
        """A stock layer with the same tensors."""
        twin = without_probe(self)
        for name in (
            "_buffers",
            "_non_persistent_buffers_set",
        ):  # `revert` may remove some
            vars(twin)[name] = copy.copy(vars(twin)[name])
        # Imported only when it is needed: it imports this module.
        import_module("normplug._convert").revert(twin)
        return twin

    def extra_repr(self) -> str:
        """The stock class's line, and what `_shown` adds."""
        return ", ".join(filter(None, [super().extra_repr(), *self._shown()]))

    def _shown(self) -> list[str]:
        return [f"mode={self.mode}"]

    def _run(self, *reading: Any) -> Any:
        """Run a call: as C++ has stored it, or by `call`.

        reading: what it depends on besides `_call_reads`: input, residual, input bias, and others.
        """
        settings = self._normplug
        if settings.statistics == "safe" and self._is_guarded():
            return self._run_guarded(*reading)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            y = native.path.run_module(self, *reading)
            if y is not None:
                return y
        t, spec = self._call(*reading)
        y = call(self._function, t, spec, settings.backend)
        if not is_compiling:
            native.path.store_module(spec, settings.backend, t, self, *reading)
        return y

    def _is_guarded(self) -> bool:
        """Whether `torch_way.guarded` keeps the running statistics safe, and not the spec."""
        return False

    def _run_guarded(self, *reading: Any) -> Any:
        """Run a call by `torch_way.guarded`, which C++ would skip: it stores no such call."""
        t, spec = self._call(*reading)

        return torch_way.guarded(t, spec.momentum, lambda t: self._run_tensors(t, spec))

    def _run_tensors(self, t: Tensors, spec: Any) -> Any:
        """Run a call of other tensors than the layer's."""
        return call(self._function, t, spec, self._normplug.backend)

    def _call(self, *reading: Any) -> tuple[Tensors, Any]:
        """The tensors and the spec of a call; `guess` asks with tensors on the meta device."""
        raise NotImplementedError

    def _asks_for_kernels(self, x: Tensor) -> bool:
        """Whether kernels run on x if they can."""
        backend = self._normplug.backend
        return can_run.is_asked_for(
            _checks.DEFAULT_BACKEND if backend == "auto" else backend, x
        )

    @property
    def _eps(self) -> Any:
        """The eps of the formula."""
        return self._normplug.eps

    def _numbers(self) -> dict[str, Any]:
        """The arguments of every formula in `normplug.reference`."""
        return {"eps": self._eps, "target_variance": self.target_variance}

    # Reading a tensor as an attribute of a module takes ten times as long as from its dict.

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias."""
        own = self._parameters
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]
        return self.weight, self.bias  # type: ignore[return-value]  # parametrized, or sharded

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Running mean, running variance and num_batches_tracked."""
        own = self._buffers
        if (
            "running_mean" in own
            and "running_var" in own
            and "num_batches_tracked" in own
        ):
            return own["running_mean"], own["running_var"], own["num_batches_tracked"]
        return self.running_mean, self.running_var, self.num_batches_tracked  # type: ignore[return-value]

    def _as_leaf(self: nn.Module, input: fx.Proxy) -> Any:
        """Make one graph node of the call of a layer, as torch.fx does for torch's own layers."""
        tracer: Any = input.tracer
        return tracer.create_proxy(
            "call_module", tracer.path_of_module(self), (input,), {}
        )

    def __prepare_scriptable__(self) -> nn.Module:
        if self.is_stock_in_files():
            return self._stock_twin()
        raise NotImplementedError(
            f"normplug: torch.jit.script cannot compile a {type(self).__name__} in mode "
            f"{self.mode}. Script normplug.unswap(model), which computes the same in stock layers, "
            "or use torch.jit.trace or torch.export."
        )

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Measure input and output for `_probe`; an empty x measures nothing."""
        probe = self._probe
        if probe is None or not probe.is_on():  # another thread may have removed it
            return
        with torch.no_grad():
            x = subclasses.own_part(x.detach())
            if x.numel() == 0:
                return
            # As few operations as possible: on a GPU their launches are what measuring costs.
            local = subclasses.own_part(y.detach())
            variance = self._variance(x)
            output = self._variance(local)
            plain: Tensor | None = output
            weight: Tensor | None = self.weight  # type: ignore[assignment]
            if weight is not None:
                weight = subclasses.own_part(weight.detach()).to(torch.float32, copy=True)
                if self._weight_offset:
                    weight += self._weight_offset
                plain = None if self._by_channel else self._plain_variance(local, weight)
        probe.store(self, x, y, Measured(variance, output, plain, weight))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None and not self.is_stock_in_files():
            metadata["target_variance"] = self.target_variance

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **named: Any,
    ) -> None:
        # Without metadata (a plain dict, safetensors) the saved mode is unknown. Metadata without a
        # target variance comes from a stock layer.
        if local_metadata:
            saved = local_metadata.get("target_variance", 1.0)
            if saved != self.target_variance:
                _checks.warn(
                    f"normplug: a checkpoint of mode {NormMode(saved)} is loaded into layers of "
                    f"mode {self.mode}: the same weights now give other outputs. Use "
                    f"normplug.set_mode(model, {NormMode(saved).argument}) to get the saved mode "
                    "(or a mapping from paths to modes, if the saved layers differ), or load first "
                    "and then swap with preserve_output=True.",
                    through=("torch",),  # where `load_state_dict` is
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **named)


def forward_of_channels(self: Any, input: Tensor) -> Tensor:
    """Normalise `input`; in training, update the statistics if there are any."""
    if isinstance(input, fx.Proxy):
        return self._as_leaf(input)
    y: Tensor = self._fused(input)
    if self._probe is not None:
        self._record(input, y)
    return y


def name_arguments(ours: Any, stock: Any) -> None:
    """Give the arguments of a forward the names that they have in the stock class.

    A call may pass them by keyword. The forward is the same code with other names, so a call costs
    nothing more.
    """
    forward = ours.forward
    code = forward.__code__
    count = code.co_argcount
    theirs = list(inspect.signature(stock.forward).parameters.values())[:count]
    names = tuple(parameter.name for parameter in theirs)
    can_be_named = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in theirs)
    if not can_be_named or len(names) < count or code.co_varnames[:count] == names:
        return
    # No variable may have the name of an argument.
    variables = [f"{v}_" if v in names else v for v in code.co_varnames[count:]]
    named = code.replace(co_varnames=(*names, *variables))
    ours.forward = FunctionType(
        named, forward.__globals__, "forward", forward.__defaults__, forward.__closure__
    )
    ours.forward.__doc__ = forward.__doc__
    ours.forward.copied_from = forward
    sites = ours._fusion_sites
    if sites is not None and sites.methods.get("forward") is forward:
        methods = {**sites.methods, "forward": ours.forward}
        ours._fusion_sites = sites._replace(methods=methods)


def original_of(method: Any) -> Any:
    """The method that `name_arguments` copied for other names, or the method itself."""
    return getattr(method, "copied_from", method)
