"""The constants of a kernel: the flags of a call, and how a launch cuts its tensors.

A kernel has two constants, T and F: the tile of its schedule, and `Constants`. It reads their
fields, such as `F.training`, and passes T and F on to its helpers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple


class KernelConstant:
    """A frozen dataclass that a kernel is compiled with; its repr is its key in Triton's cache."""


@cache
def as_compiled(constant: Any) -> Any:
    """A `KernelConstant` as the compiler reads it: each field is a `constexpr`.

    Triton 3.3 cannot compile `not`, `and` and `or` of plain numbers. The result is stored, since
    the layers of a model share their constants.
    """
    import triton.language as tl

    values = {field.name: getattr(constant, field.name) for field in fields(constant)}
    return replace(
        constant, **{name: tl.constexpr(value) for name, value in values.items()}
    )


@dataclass(frozen=True)
class Constants(KernelConstant):
    """What a call has and asks for. A launch sets only the flags that its kernel reads.

    Attributes:
        acc: the dtype to compute in: float32, or float64 if a tensor is float64.
        training: BatchNorm: mean and rstd are the batch's; else they come from the running
            statistics, or from `stats` if they are `given`.
        given: mean and rstd are read from `stats`.
        normalize: y is written; without it, only statistics are.
        variance: `stats` are (mean, var), not (mean, rstd).
        weight, bias, residual: there is one, and it is needed.
        for_residual: a norm that another one adds: the other's `stats` get what it needs.
        residual_norm: the residual is normalised as it is read, by what `stats` has for it.
        bits: relu's mask is saved, one bit per value, so that the residual or x need not be.
        activation: the activation's code: see `activation`.
        running: the running statistics are updated.
        cumulative: they are averages over `tracked` batches; else they move by the momentum.
        tracked: `tracked` is incremented.
        safe: a channel whose moments are not finite updates nothing; the first channel's decide
            whether the batch is counted.
        world: the processes that join their batches: see `batch_norm.exchange`.
        sums: backward, the sums over the batch are needed: for dweight, dbias, `late` or `share`.
        late: dx depends on the sums, so it is written after them; else statistics are constants.
        share: another kernel writes dx, from terms that this one stores in place of it, in `acc`.
        joined: those terms are over all processes, and are read in place of dweight.
        peaks: the largest values and their places are written, for the backward of max pooling.
        dx, dresidual, dweight, dbias, dinput_bias, dstats: this gradient is wanted.
        centred: of rows, the mean is subtracted; if not, `stats` has rstd only, and no running mean
            is updated.
        offset: added to the weight.
        rounded: the dtype to round to before multiplying by the weight, or `acc`.
        input_bias, dtotal: there is one.
        gate: of an RMSNorm: "first" if silu(gate) multiplies x, "last" if it multiplies the norm of
            x; "" without one.
        gated: the dtype to round to before multiplying by a last gate, or `acc`.
        dgate: the gate's gradient is wanted.
        stats: the rows' statistics are written.
        normalised: of rows, a forward also writes the normalised values, which other launches then
            read in place of x.
        dx_as_x: the rows of dx have the strides of x; else they are contiguous.
    """

    acc: Any
    training: bool = False
    given: bool = False
    normalize: bool = False
    variance: bool = False
    weight: bool = False
    bias: bool = False
    residual: bool = False
    for_residual: bool = False
    residual_norm: bool = False
    bits: bool = False
    activation: float = 0
    running: bool = False
    cumulative: bool = False
    tracked: bool = False
    safe: bool = False
    world: int = 1
    sums: bool = False
    late: bool = False
    share: bool = False
    joined: bool = False
    peaks: bool = False
    dx: bool = False
    dresidual: bool = False
    dweight: bool = False
    dbias: bool = False
    dinput_bias: bool = False
    dstats: bool = False
    centred: bool = False
    offset: float = 0.0
    rounded: Any = None
    input_bias: bool = False
    dtotal: bool = False
    stats: bool = False
    normalised: bool = False
    dx_as_x: bool = False
    gate: str = ""
    gated: Any = None
    dgate: bool = False


class Work(NamedTuple):
    """How a launch cuts its tensors: what its schedule decides.

    sizes: the kernel's sizes, by name. cooperative: the programs must all run at once.
    """

    grid: int
    warps: int
    tile: KernelConstant
    sizes: dict[str, int]
    cooperative: bool = False
