"""BatchNorm's kernels as operators, for compilers: see `normplug._ops.library`.

Torch operations outside the operator update the running statistics. A compiler fuses these, and
the operator has no side effects.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normplug import _activations
from normplug._layouts import dense
from normplug._ops import statistics
from normplug._ops.batch_norm import peers
from normplug._ops.library import NormOperators
from normplug._ops.spec import BatchNormSpec, Pool, Route, Tensors
from normplug.reference import accumulator_dtype

_NUMBERS = (
    "bool training, float eps, float target_variance, str? activation, float slope, int[] pool, "
    "int peers"
)


class _BatchNorm(NormOperators):
    def kernels(self) -> Any:
        from normplug._ops.batch_norm.eager import KERNELS

        return KERNELS

    def spec(
        self,
        training: bool,
        eps: float,
        target_variance: float,
        activation: str | None,
        slope: float,
        pool: list[int],
        number: int,
    ) -> BatchNormSpec:
        window = None
        if pool:
            kh, kw, sh, sw, ph, pw, ceil_mode = pool
            window = Pool((kh, kw), (sh, sw), (ph, pw), bool(ceil_mode))
        chosen = _activations.joined(activation, slope)
        others = peers.by_number(number)
        return BatchNormSpec(training, 0.0, eps, target_variance, chosen, window, peers=others)

    def reads_residual(self, spec: BatchNormSpec) -> bool:
        return _activations.backward_reads_input(spec.activation)

    def passes_dy(self, spec: BatchNormSpec) -> bool:
        return spec.activation is None

    def fake(self, t: Tensors, spec: BatchNormSpec) -> tuple[Tensor, ...]:
        from normplug._kernels.batch_norm import schedule

        x = dense(t.x)
        n, c, planes = x.shape[0], x.shape[1], math.prod(x.shape[2:])
        stats = x.new_empty(2 * c + int(spec.peers is not None), dtype=accumulator_dtype(x.dtype))
        count = 0
        if t.residual is not None and spec.activation == "relu":
            channels_last = not x.is_contiguous()
            count = schedule.mask_bytes(n, c, planes, channels_last, x.element_size())
        return torch.empty_like(x), stats, x.new_empty(count, dtype=torch.uint8)

    def fake_dx(self, x: Tensor, spec: BatchNormSpec) -> Tensor:
        return dense(x)


class _BatchNormMaxPool(_BatchNorm):
    def kernels(self) -> Any:
        from normplug._ops.batch_norm.pooled import KERNELS

        return KERNELS

    def fake(self, t: Tensors, spec: BatchNormSpec) -> tuple[Tensor, ...]:
        assert spec.pool is not None
        x = t.x
        n, c, height, width = x.shape
        shape = (n, c, *spec.pool.size(height, width))
        y, peaks, places = (
            torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
            for dtype in (x.dtype, x.dtype, torch.uint8)
        )
        size = 2 * c + int(spec.peers is not None)
        return y, x.new_empty(size, dtype=accumulator_dtype(x.dtype)), peaks, places

    def fake_dx(self, x: Tensor, spec: BatchNormSpec) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


PLAIN = _BatchNorm(
    "batch_norm", _NUMBERS, ("stats", "bits"), has_total=False, updates_running=False
)
POOLED = _BatchNormMaxPool(
    "batch_norm_max_pool",
    _NUMBERS,
    ("stats", "peaks", "places"),
    has_total=False,
    updates_running=False,
)


class _Compiled(Route):
    def __call__(self, t: Tensors, spec: BatchNormSpec) -> Tensor:
        return self.joined(t, spec, 0)[0]

    def joined(self, t: Tensors, spec: BatchNormSpec, number: int) -> tuple[Tensor, Tensor]:
        """Y and stats, with the batches of the peers of a number; 0 for none."""
        pool, mean, var = spec.pool, t.running_mean, t.running_var
        constants = (None, None) if spec.training else (mean, var)
        tensors = (t.x, t.residual, t.weight, t.bias, None, *constants, None)
        activation = _activations.parts(spec.activation)
        numbers = (spec.training, spec.eps, spec.target_variance, *activation)
        if pool is None:
            y, stats, *_ = _plain_operator(*tensors, *numbers, [], number)
        else:
            window = [*pool.kernel, *pool.stride, *pool.padding, int(pool.ceil_mode)]
            y, stats, *_ = _pooled_operator(*tensors, *numbers, window, number)
        if spec.training and mean is not None and var is not None:
            c = t.x.shape[1]
            with torch.no_grad():
                batch_var = statistics.variance_of(stats[c : 2 * c], spec.eps)
                if number:
                    counts = stats[-1] > 1
                    batch_var *= stats[-1] / (stats[-1] - 1).clamp(min=1)
                else:
                    counts, n = None, t.x.numel() // c
                    batch_var *= n / (n - 1)
                statistics.update(t, spec.momentum, stats[:c], batch_var, counts)
        return y, stats


_plain_operator, _pooled_operator = PLAIN.differentiable, POOLED.differentiable
COMPILED = _Compiled()
