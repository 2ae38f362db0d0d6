"""BatchNorm, with a residual, an activation and max pooling: its spec and its operators.

A SyncBatchNorm normalises over the joined batch of a group of processes. The kernels exchange the
statistics where they can: see `exchange`. Otherwise each call sends `collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normplug import _activations, _checks, native
from normplug._activations import ActivationLike
from normplug._choices import Backend
from normplug._layouts import dense, is_channels_last, laid_out_like
from normplug._ops import can_run, collectives, exchange, torch_way
from normplug._ops.call import Way, key_of, made_once
from normplug._ops.operators import NormOperators
from normplug._ops.plans import Plan
from normplug._ops.spec import Pool, Tensors
from normplug._torch import applier, interposed, transforms_active
from normplug.reference import accumulator_dtype, channel_dims

_OPERATOR_BYTES = 16 << 20  # of input, from which torch.compile calls the operator
_LAST = torch.channels_last


class BatchNormSpec(NamedTuple):
    """The spec of a BatchNorm call.

    keeps_residual: save the residual for the backward, so that the result can be recomputed.
    isolated: whether a compiler gains nothing by fusing the norm with its neighbours.
    join: the number of the `exchange.Join` of the processes that join their batches; 0 for one.
    for_residual: whether the call returns what another norm's call needs to add its result: the
        vector of `ResidualPlan`, without a gradient. The other call takes the x of this one as its
        residual, and the vector, from `with_gradient`, as its `input_bias`.
    residual_eps: the eps of the residual's norm, in that other call.
    instance: whether it is an InstanceNorm in evaluation with running statistics.
    constant: whether neither weight nor bias needs a gradient, in evaluation, so that the backward
        needs no x.
    safe: whether a channel whose batch is not finite leaves its running statistics unchanged.
    """

    training: bool
    momentum: float | None
    eps: float
    target_variance: float
    activation: ActivationLike = None
    pool: Pool | None = None
    keeps_residual: bool = False
    isolated: bool = False
    join: int = 0
    for_residual: bool = False
    residual_eps: float | None = None
    instance: bool = False
    constant: bool = False
    safe: bool = False

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """In evaluation, all dimensions but the channels; with pooling, the samples."""
        if self.training:
            return ()
        return (0,) if self.pool is not None else channel_dims(t.x)

    def check(self, caller: str, t: Tensors) -> None:
        _checks.tensors(caller, *t)
        _checks.flags(caller, training=self.training)
        _checks.number(caller, "eps", self.eps)
        statistics = {"running_mean": t.running_mean, "running_var": t.running_var}
        _checks.channels(caller, t.x, **statistics, weight=t.weight, bias=t.bias)
        _checks.running_pair(caller, t.running_mean, t.running_var, self.training)
        _checks.scalars(caller, num_batches_tracked=t.tracked)
        updates = self.training and t.running_mean is not None
        _checks.momentum(caller, self.momentum, t.tracked, updates)
        has_one_value = t.x.numel() > 0 and t.x.numel() == t.x.shape[1]
        if self.training and not self.join and has_one_value:
            raise _checks.one_value(caller, f"input of shape {tuple(t.x.shape)}")
        _checks.activation(caller, self.activation)
        _checks.same_shape(caller, t.x, residual=t.residual)

    # PyTorch's kernels.

    def by_torch(self, t: Tensors) -> Tensor:
        if self.safe and self.training:
            y: Tensor = torch_way.guarded(t, self.momentum, self._by_torch)
            return y
        return self._by_torch(t)

    def _by_torch(self, t: Tensors) -> Tensor:
        if self.for_residual:
            return self._for_residual(t)
        if t.input_bias is not None:
            assert t.residual is not None
            assert self.residual_eps is not None
            *_, gain, bias = _parts_of_residual_norm(t.input_bias)
            other = self._replace(eps=self.residual_eps, target_variance=1.0)
            wide = Tensors(t.residual.to(gain.dtype), weight=gain, bias=bias)
            residual = other._joined(wide) if self.join else other._normalised(wide)
            y = self._by_torch(t._replace(residual=residual, input_bias=None))
            return y.to(t.x.dtype)
        y = self._joined(t) if self.join else self._normalised(t)
        # In place if possible: nothing else holds y, nor does the backward need it.
        in_place = not transforms_active()
        if t.residual is not None:
            same = t.residual.shape == y.shape and t.residual.dtype == y.dtype
            y = y.add_(t.residual) if in_place and same else y + t.residual
        if self.activation == "relu" and in_place:
            y = y.relu_()
        elif self.activation is not None:
            y = _activations.apply(self.activation, y)
        return y if self.pool is None else self.pool.of(y)

    def _joined(self, t: Tensors) -> Tensor:
        """The norm alone, over the joined batch of several processes."""
        return collectives.batch_norm(t, self, self._own_statistics())

    def _own_statistics(self) -> collectives.Statistics:
        """What computes the statistics of this process's batch, where processes join theirs."""
        return partial(channel_stats, backend=exchange.joins[self.join].backend)

    def _for_residual(self, t: Tensors) -> Tensor:
        """The result of a `ResidualPlan`."""
        acc = accumulator_dtype(t.x.dtype)
        x = t.x.detach()
        if self.join:
            moments = collectives.moments(x, self, self._own_statistics())
            mean, rstd, unbiased, n = moments
            if t.running_mean is not None:
                collectives.update_running(t, self, mean, unbiased, n)
            count = [n.view(1)]
        else:
            mean, var = channel_stats(x, "torch")
            rstd = torch.rsqrt(var + self.eps)
            values = x.numel() // x.shape[1]
            if t.running_mean is not None:
                unbiased = var * (values / (values - 1))
                torch_way.update_running(t, self.momentum, mean, unbiased)
            count = []
        gain = torch.full_like(mean, math.sqrt(self.target_variance))
        if t.weight is not None:
            gain *= t.weight.detach()
        bias = torch.zeros_like(mean) if t.bias is None else t.bias.detach().to(acc)
        unset = torch.zeros_like(mean)
        return torch.cat([unset, unset, mean, rstd, gain, bias, *count])

    def _normalised(self, t: Tensors) -> Tensor:
        """Call ATen's operator, since `torch.nn.functional.batch_norm` refuses an eps of 0."""
        x = t.x
        mean, var = t.running_mean, t.running_var
        momentum = self.momentum or 0.0
        weight = torch_way.scaled_channels(
            t, self.target_variance, None if self.instance else mean
        )
        if x.numel() == 0:
            return torch_way.empty_norm(x, weight, t.bias)
        updates = self.training and mean is not None
        if updates and t.tracked is not None:
            if self.momentum is not None:
                t.tracked.add_(1)
            elif torch_way.has_readable_count(t):
                # As in torch.nn, bit for bit.
                t.tracked.add_(1)
                momentum = 1.0 / max(float(t.tracked), 1.0)
            else:
                # Before the norm, which saves the last tensors for the backward.
                values = x.detach().to(accumulator_dtype(x.dtype))
                batch_var, batch_mean = torch.var_mean(values, channel_dims(x))
                torch_way.update_running(t, None, batch_mean, batch_var)
                mean = var = None
        given = (x, weight, t.bias, mean, var)
        cudnn = torch.backends.cudnn.enabled
        if self.instance:  # it is contiguous, and takes statistics of any dtype
            y = torch.instance_norm(*given, False, 0.0, self.eps, cudnn)
        else:
            y = torch.batch_norm(*given, self.training, momentum, self.eps, cudnn)
        return torch_way.realigned(y)

    # Normplug's kernels.

    def refusal(self, t: Tensors) -> str | None:
        if self.pool is not None:
            why = _refusal_to_pool(t.x, self.pool)
            if why is not None:
                return why
        if t.residual is not None and t.residual.dtype != t.x.dtype:
            return f"the input is {t.x.dtype} and the residual {t.residual.dtype}"
        mean, var = t.running_mean, t.running_var
        if mean is not None and var is not None and mean.dtype != var.dtype:
            return "running_mean and running_var differ in dtype"
        if self.join:
            most = exchange.most_channels(self.join)
            if most == 0:
                return "the processes exchange statistics by collectives"
            if t.x.shape[1] > most:
                return f"it has more than {most} channels"
            if t.x.numel() == 0:  # the kernels do not read it
                t = t._replace(x=t.x.new_empty(1, *t.x.shape[1:2]), residual=None)
        why = can_run.refusal_of(t)
        if why is None and t.x.shape[0] * math.prod(t.x.shape[2:]) >= 2**31:
            why = "a channel has 2^31 values or more"
        return why

    def laid_out(self, t: Tensors) -> Tensors:
        """The call with x dense, and the residual in the layout of x."""
        x, residual = self.fake_dx(t.x), t.residual
        if residual is not None and residual.stride() != x.stride():
            residual = laid_out_like(residual, x)
        return t.reading(x, residual)

    def without_kernels(
        self, t: Tensors, why: str, choose: Callable[[BatchNormSpec], Way]
    ) -> Way | None:
        """Pool apart from the norm, which may still run in kernels. A joined batch needs none."""
        pool = self.pool
        if pool is not None:
            way = choose(self._replace(pool=None))
            run = way.run  # what is stored must not hold the tensors of `way`
            return way._replace(run=lambda t: pool.of(run(t)))
        return Way(self.by_torch, t, why) if self.join else None

    def plan(self, t: Tensors) -> Plan:
        page = _plans()
        make = page.BatchNormPlan if self.pool is None else page.PooledPlan
        if self.for_residual:
            make = page.ResidualPlan
        plan: Plan = make(t, self)
        return plan

    # The operators for compilers. Torch operations outside them update the running statistics: a
    # compiler fuses these, and the operators have no side effects.

    def compiled(self, t: Tensors) -> Callable[[Tensors], Any] | None:
        """An operator, if the norm is large and includes its neighbours, or is `isolated`.

        Inductor fuses a norm with what follows it, and an opaque operator prevents that. So an
        operator is faster only if it fuses more itself, or if there is nothing to fuse the norm
        with. Kernels that read pixels of an odd number of bytes are slower than Inductor's.

        Between convolutions, Inductor usually computes contiguous images as channels_last. An
        operator gets the layout that it has in eager mode, so Inductor would copy its inputs and
        outputs (docs/notebook.md).
        """
        fuses = t.residual is not None or self.activation is not None
        if t.x.is_contiguous():
            is_image = t.x.dim() == 4
            suits = not is_image
        else:
            suits = t.x.shape[1] * t.x.element_size() % 16 == 0
        pays = (
            (fuses or self.isolated) and suits and can_run.size_of(t.x) >= _OPERATOR_BYTES
        )
        return self.operator if pays or self.join else None

    def operator(self, t: Tensors) -> Tensor:
        pool = self.pool
        mean = t.running_mean
        constants = (None, None) if self.training else (mean, t.running_var)
        tensors = (t.x, t.residual, t.weight, t.bias, None, *constants, None)
        activation = _activations.parts(self.activation)
        numbers = (self.training, self.eps, self.target_variance, *activation)
        if pool is None:
            y, stats, *_ = _plain(*tensors, *numbers, [], self.join, False)
        else:
            window = [*pool.kernel, *pool.stride, *pool.padding, int(pool.ceil_mode)]
            y, stats, *_ = _pooled(*tensors, *numbers, window, self.join, False)
        if self.training and mean is not None:
            with torch.no_grad():
                if self.safe:
                    torch_way.guarded(
                        t, self.momentum, lambda new: self._update_by(new, stats)
                    )
                else:
                    self._update_by(t, stats)
        return y

    def _update_by(self, t: Tensors, stats: Tensor) -> None:
        """Update the running statistics by the operator's stats: mean, rstd and, if joined, n."""
        c = t.x.shape[1]
        var = torch_way.variance_of(stats[c : 2 * c], self.eps)
        if self.join:
            n = stats[-1]
            unbiased = var * (n / (n - 1).clamp(min=1))
            torch_way.update_running(t, self.momentum, stats[:c], unbiased, counts=n > 1)
        else:
            values = t.x.numel() // c
            unbiased = var * (values / (values - 1))
            torch_way.update_running(t, self.momentum, stats[:c], unbiased)

    def fake(self, t: Tensors) -> tuple[Tensor, ...]:
        n, c, *space = t.x.shape
        stats = t.x.new_empty(
            2 * c + int(self.join > 0), dtype=accumulator_dtype(t.x.dtype)
        )
        if self.pool is not None:
            shape = (n, c, *self.pool.size(t.x))
            y, peaks, places = (
                torch.empty(shape, dtype=dtype, device=t.x.device, memory_format=_LAST)
                for dtype in (t.x.dtype, t.x.dtype, torch.uint8)
            )
            return y, stats, peaks, places
        from normplug._kernels.batch_norm import schedule

        x = dense(t.x)
        count = 0
        if t.residual is not None and self.activation == "relu":
            channels_last = not x.is_contiguous()
            count = schedule.mask_bytes(
                n, c, math.prod(space), channels_last, x.element_size()
            )
        return torch.empty_like(x), stats, x.new_empty(count, dtype=torch.uint8)

    def fake_dx(self, x: Tensor) -> Tensor:
        """Lay x out as the kernels read it, and as they write its gradient."""
        if self.pool is not None:
            return x.contiguous(memory_format=torch.channels_last)
        return dense(x)


def _parts_of_residual_norm(vector: Tensor) -> tuple[Tensor, ...]:
    """The six parts of the vector of a `ResidualPlan`, or of its gradient."""
    c = vector.shape[0] // 6  # without the count of a joined batch
    return vector[: 6 * c].chunk(6)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        root: float,
        make: Callable[[], Tensor],
    ) -> Tensor:
        ctx.root = root
        ctx.dtypes = [None if v is None else v.dtype for v in (weight, bias)]
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *_, gain, bias = _parts_of_residual_norm(gradient)
        dweight = gain if ctx.root == 1.0 else gain * ctx.root
        pairs = zip((dweight, bias), ctx.dtypes, strict=True)
        return (
            *(None if dtype is None else d.to(dtype) for d, dtype in pairs),
            None,
            None,
        )


_apply = applier(_WithGradient)


def with_gradient(
    weight: Tensor | None,
    bias: Tensor | None,
    target_variance: float,
    make: Callable[[], Tensor],
) -> Tensor:
    """The result of a call `for_residual`, through which weight and bias get their gradients.

    make: runs the call.
    """
    y: Tensor = _apply(weight, bias, math.sqrt(target_variance), make)
    return y


def _refusal_to_pool(x: Tensor, pool: Pool) -> str | None:
    """Why the kernels cannot pool the result of a norm of x; None if they can."""
    from normplug._kernels.batch_norm.windows import LARGEST_WINDOW

    if x.dim() != 4 or x.is_contiguous() or not is_channels_last(x.shape, x.stride()):
        return "the input is not channels_last"
    if max(math.prod(pool.kernel), math.prod(pool.stride)) > LARGEST_WINDOW:
        return "max-pool windows and strides must span at most 25 elements"
    n, c, _, width = x.shape
    pooled = pool.size(x)
    if can_run.is_too_long(n * math.prod(pooled), width * c, pooled[1] * c):
        return "a row has nearly 2^31 values or more, or the output that many pixels"
    return None


def _plans() -> Any:
    """The module of the plans. It imports Triton and this module, so it is imported late."""
    return import_module("normplug._ops.batch_norm_plan")


def _spec_of(
    training: bool,
    eps: float,
    target_variance: float,
    activation: str | None,
    slope: float,
    pool: list[int],
    join: int,
) -> BatchNormSpec:
    window = None
    if pool:
        kh, kw, sh, sw, ph, pw, ceil_mode = pool
        window = Pool((kh, kw), (sh, sw), (ph, pw), bool(ceil_mode))
    chosen = _activations.joined(activation, slope)
    return BatchNormSpec(training, 0.0, eps, target_variance, chosen, window, join=join)


_NUMBERS = (
    "bool training, float eps, float target_variance, str? activation, float slope, int[] pool, "
    "int join"
)
PLAIN, POOLED = (
    NormOperators(name, BatchNormSpec, _spec_of, _NUMBERS, state)
    for name, state in (
        ("batch_norm", ("stats", "bits")),
        ("batch_norm_max_pool", ("stats", "peaks", "places")),
    )
)
# For torch.compile, which guards on each attribute that it reads.
_plain, _pooled = PLAIN.differentiable, POOLED.differentiable


def channel_stats(x: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """`functional.channel_stats` of a checked x. A kernel reads x once, without gradients."""
    differentiates = x.requires_grad and torch.is_grad_enabled()
    if can_run.is_asked_for(backend, x) and not (
        differentiates or torch.compiler.is_compiling()
    ):
        stats = _stats_by_kernel(Tensors(dense(x.detach())))
        if stats is not None:
            mean, var = stats.chunk(2)
            return mean, var
    x = x.to(accumulator_dtype(x.dtype))
    if x.numel() == 0:
        nan = x.new_full((x.shape[1],), torch.nan)
        return nan, nan.clone()
    var, mean = torch.var_mean(x, dim=channel_dims(x), correction=0)
    return mean, var


_BATCH = BatchNormSpec(True, 0.0, 0.0, 1.0)
_STATISTICS = "statistics"  # in place of a backend, in the keys of these calls


def _stats_by_kernel(t: Tensors) -> Tensor | None:
    """Mean and variance of the channels in one vector; None if no kernel can compute them."""
    stats = native.path.run_call(_BATCH, _STATISTICS, t)
    if stats is not None:
        return stats
    if interposed() or can_run.refusal_now() or _BATCH.refusal(t):
        return None
    key = key_of(t, _BATCH, _STATISTICS)
    run = made_once(key, _plans().StatisticsPlan, t, _BATCH).run
    stats = native.path.store_call(_BATCH, _STATISTICS, t, t, run)
    return run(t) if stats is None else stats
