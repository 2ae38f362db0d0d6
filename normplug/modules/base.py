"""What every normplug layer has and declares."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from normplug.modes import ModeLike, NormMode, target_variance
from normplug.modules import eps_reader
from normplug.modules.fusion_sites import FusionSites


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
    # What `normplug.fuse` may run in one call with the layer; None: nothing.
    _fusion_sites: FusionSites | None = None

    @property
    def eps(self) -> float:
        """As the torch class's; code that would drop the target variance is refused."""
        return self._eps if self.target_variance == 1.0 else eps_reader.eps_to_reader(self)

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
