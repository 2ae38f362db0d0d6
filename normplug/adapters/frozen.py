"""Frozen batch norms, recognised by what their forward computes.

torchvision has a FrozenBatchNorm2d, and so have detectron2, DETR and copies of them: four buffers,
weight, bias, running_mean and running_var, which are constants. `probe_frozen_norm` runs the
forward of a class on a small input, and takes the class if it computes a BatchNorm in evaluation.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normplug import reference
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.spec import Tensors
from normplug.modules.base import TargetVarianceNorm
from normplug.modules.batch_norm import _BatchNorm

_BUFFERS = ("weight", "bias", "running_mean", "running_var")
# Why the layers of other classes stay.
UNKNOWN = "frozen batch norm: it uses stored statistics, so there is no variance to set"
_EPS = 1e-5  # of classes that have no attribute for it, such as DETR's


class LibraryFrozenNorm(TargetVarianceNorm):
    """A BatchNorm whose weight, bias and statistics are buffers.

    It saves nothing for the backward; with relu in the same call, one bit per element. It returns
    the dtype of its input, where the stock classes under autocast return the dtype of the buffers.
    """

    _function = "functional.batch_norm"
    _lacks_eps: ClassVar[bool]  # whether eps is a constant of the stock forward
    forward = _BatchNorm.forward
    _fused = _BatchNorm._fused
    _variance = _BatchNorm._variance
    _by_channel = True
    _fusion_sites = _BatchNorm._fusion_sites

    @classmethod
    def _refusal(cls, module: nn.Module) -> str | None:
        if set(_BUFFERS) - set(module._buffers) or module._parameters:
            return "it lacks one of the four buffers of a frozen batch norm"
        return None

    @classmethod
    def _adopt(
        cls, module: nn.Module, track_running_stats: bool | None, device: Any
    ) -> None:
        vars(module).setdefault("eps", _EPS)

    @classmethod
    def _leave(cls, module: nn.Module) -> None:
        if cls._lacks_eps:
            del module.eps

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._buffers["running_mean"], self._buffers["running_var"], None

    def _call(
        self, input: Tensor, residual: Tensor | None, input_bias: None, *options: Any
    ) -> tuple[Tensors, BatchNormSpec]:
        t = Tensors(input, residual, *self._affine(), None, *self._statistics())
        settings = self._normplug
        numbers = (0.0, settings.eps, settings.target_variance)
        fields: Any = {"constant": True}
        return t, BatchNormSpec(False, *numbers, *options, **fields)

    def _affine_shape(self) -> tuple[int, ...]:
        return tuple(self._buffers["weight"].shape)  # type: ignore[union-attr]

    def _example_shape(self) -> tuple[int, ...]:
        return (4, *self._affine_shape(), 2, 2)

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        weight, bias = self._affine()
        mean, var, _ = self._statistics()
        return reference.batch_norm(
            x, weight, bias, **self._numbers(), mean=mean, var=var
        ).y


@torch.no_grad()
def probe_frozen_norm(
    cls: type[nn.Module],
) -> tuple[type[LibraryFrozenNorm], dict[str, Any]] | str:
    """The base and the attributes of a class's normplug class, or why there is none."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        generator = torch.Generator("cpu").manual_seed(0)
        values = [
            torch.rand(3, generator=generator, dtype=torch.float64) + 0.1
            for _ in _BUFFERS
        ]
        values[-1] *= 1e-4  # so that a wrong eps shows
        layer: Any = object.__new__(cls)
        nn.Module.__init__(layer)
        for name, value in zip(_BUFFERS, values, strict=True):
            layer.register_buffer(name, value)
        x = torch.randn(2, 3, 2, 2, generator=generator, dtype=torch.float64)
        weight, bias, mean, var = values
        expected = reference.batch_norm(x, weight, bias, eps=_EPS, mean=mean, var=var).y
        lacks_eps = True
        try:
            y = cls.forward(layer, x.clone())
        except AttributeError:
            lacks_eps = False
            layer.eps = _EPS
            y = cls.forward(layer, x.clone())
        if not torch.allclose(y, expected):
            return UNKNOWN
        return LibraryFrozenNorm, {"_lacks_eps": lacks_eps}
