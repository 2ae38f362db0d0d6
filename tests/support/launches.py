"""The launches of a forward and a backward, for tests that compile their kernels."""

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget

from normplug._kernels import launch
from normplug._layouts import Levels
from normplug._ops import exchange
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.batch_norm_plan import PooledPlan
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.plans import BLANKS, SLOT
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Pool, Tensors

SMS, SHARED = 132, 227 << 10  # an H100's
H100 = GPUTarget("cuda", 90, 32)


class Driver:
    """A driver that reports an H100, which need not exist."""

    def get_current_target(self):
        return H100

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


# A join of two processes whose kernels exchange statistics.
JOIN = len(exchange.joins)
exchange.joins.append(
    SimpleNamespace(peers=SimpleNamespace(world=2, table=1 << 40, mark=0, turn=0))
)
# Gradients: of x, residual, weight, bias and input_bias.
ALL = (
    True,
    True,
    True,
    True,
    True,
)


def empty(shape, dtype, channels_last=False):
    """A tensor without memory."""
    if not channels_last:
        return torch.empty(shape, dtype=dtype, device="meta")
    n, c, *space = shape
    return torch.empty((n, *space, c), dtype=dtype, device="meta").movedim(-1, 1)


def vector(size, dtype):
    """A weight or a bias, or running statistics, of an input of this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.empty(size, dtype=wide, device="meta")


def programs(plan, t, needs=(ALL,), dy=None):
    """The names and programs of a plan: its forward, and a backward for each of `needs`.

    dy: a tensor with the strides of the gradient; by default, it has the strides of y.
    """
    forward = plan.forward_program(t, True)
    yield "forward", forward
    if not forward.saved:
        return
    slots = [*t, *BLANKS]
    for slot, shape, stride, dtype in forward.empties:
        slots[slot] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    saved = [slots[slot] for slot in forward.saved]
    gradient = slots[SLOT["y"]] if dy is None else dy
    dtotals = (slots[SLOT["total"]], None) if plan.has_total else (None,)
    for wanted in needs:
        asked = tuple(
            want and a is not None for want, a in zip(wanted, t[:5], strict=True)
        )
        name = "backward " + "".join(str(int(want)) for want in asked)
        for dtotal in dtotals:
            without = " without dtotal" if plan.has_total and dtotal is None else ""
            yield name + without, plan.backward_of(saved, gradient, dtotal, asked)
    if plan.is_recomputable:
        yield "recompute", plan.recompute_of(saved)


def launches_of(plan, t, dy=None):
    """The launches of a plan: of its forward, and of its backward for a dy with these strides."""
    for name, program in programs(plan, t, dy=dy):
        if name.split()[-1] not in ("recompute", "dtotal"):
            yield from (step.launch for step in program.steps)


def batch_call(
    shape,
    last,
    dtype,
    *,
    residual=False,
    vectors=True,
    running=True,
    tracked=True,
    training=True,
    momentum=0.1,
    residual_norm=False,
    **given,
):
    """The tensors and the spec of a BatchNorm; residual_norm: of the norm that its residual has."""
    c = shape[1]
    joins = bool(given.get("join"))
    t = Tensors(
        x=empty(shape, dtype, last),
        residual=empty(shape, dtype, last) if residual else None,
        weight=vector(c, dtype) if vectors else None,
        bias=vector(c, dtype) if vectors else None,
        input_bias=vector(6 * c + joins, dtype) if residual_norm else None,
        running_mean=vector(c, dtype) if running else None,
        running_var=vector(c, dtype) if running else None,
        tracked=empty((), torch.int64) if running and tracked else None,
    )
    return t, BatchNormSpec(training, momentum, 1e-5, 0.6, **given)


def batch_norm_launches(shape, dtype, residual, sms=SMS, **options):
    """shape: N, C, values per plane, and whether channels are adjacent in memory."""
    *sizes, last = shape
    t, spec = batch_call((*sizes, 1), last, dtype, residual=residual, **options)
    plan = spec.plan(t)
    plan._machine = (sms, launch.COOPERATIVE)
    return launches_of(plan, t)


def pool_launches(dtype):
    """The launches of a joined BatchNorm with relu and max pooling, which are of four kernels."""
    pool = Pool((3, 3), (2, 2), (1, 1), False)
    shape = (64, 64, 112, 112)
    t, spec = batch_call(shape, True, dtype, activation="relu", pool=pool, join=JOIN)
    return launches_of(PooledPlan(t, spec), t)


def row_call(
    x,
    *,
    residual=False,
    vectors=True,
    input_bias=False,
    running=False,
    centred=True,
    momentum=0.1,
    autocast=None,
    autocast_output="low",
    scales=None,
    **given,
):
    """The tensors and the spec of a norm of the rows of x.

    scales: the shape of the scale and of the shift of an adaptive norm, if it is one. They are
    slices of a larger tensor.
    """
    width = x.shape[-1]
    number = vector((), x.dtype)
    t = Tensors(
        x=x,
        residual=empty(x.shape, x.dtype) if residual else None,
        weight=vector(width, x.dtype) if vectors else None,
        bias=vector(width, x.dtype) if vectors and centred else None,
        input_bias=vector(width, x.dtype) if input_bias else None,
        running_mean=number if running and centred else None,
        running_var=number if running else None,
        tracked=empty((), torch.int64) if running else None,
    )
    if given.get("gate") is not None:
        t = t._replace(residual=empty(x.shape, x.dtype))
    if scales is not None:
        whole = empty((*scales[:-1], 6 * width), x.dtype)
        t = t._replace(weight=whole[..., :width], bias=whole[..., width : 2 * width])
        given = {"weight_offset": 1.0, "adaptive": True, **given}
    settings = (momentum, 1e-5, 0.6, autocast, autocast_output, centred)
    return t, LayerNormSpec((width,), *settings, **given)


def row_launches(rows, width, dtype, spacing, sms=SMS, shared=SHARED, **options):
    """The launches of an x and a dy whose rows lie so; `options` are of `row_call`."""
    if isinstance(spacing, Levels):
        inner, outer, step, heads, middle = spacing
        shape = (rows // (inner * heads), heads, inner, width)
        strides = (outer, middle, step, 1)
    else:
        shape = (rows, width)
        strides = (spacing, 1)
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    t, spec = row_call(x, **options)
    plan = spec.plan(t)
    plan._machine = (sms, shared, launch.COOPERATIVE)
    return launches_of(plan, t, x)


def group_call(shape, groups, last, dtype, *, vectors=True, activation=None):
    """The tensors and the spec of a GroupNorm."""
    c = shape[1]
    t = Tensors(
        x=empty(shape, dtype, last),
        weight=vector(c, dtype) if vectors else None,
        bias=vector(c, dtype) if vectors else None,
    )
    return t, GroupNormSpec(groups, 1e-5, 0.6, activation)


def group_norm_launches(shape, dtype, sms=SMS):
    """shape: N, groups, channels per group, values per plane, and whether channels are adjacent."""
    n, groups, channels, space, last = shape
    activation = ("leaky_relu", 0.2) if dtype == torch.float64 else "silu"
    sizes = (n, groups * channels, space, 1)
    t, spec = group_call(sizes, groups, last, dtype, activation=activation)
    plan = spec.plan(t)
    plan._machine = sms
    return launches_of(plan, t)
