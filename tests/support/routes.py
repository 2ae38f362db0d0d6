"""Force, watch and count routes: what tests need to know of the internals of `_ops` belongs here.

Import it after `pytest.importorskip("triton")` where a test needs the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from normplug import native, target_variance
from normplug._activations import backward_reads_input
from normplug._ops import batch_norm as batch_norms
from normplug._ops import call as calls
from normplug._ops import can_run, recompute, row_norms
from normplug._ops import group_norm as group_norms
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.operators import flags_of
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Pool, Tensors, to_text
from normplug.modules import base

HAS_RECOMPUTE = recompute.AVAILABLE
NEEDS_RECOMPUTE = pytest.mark.skipif(not HAS_RECOMPUTE, reason="needs torch 2.8")
# Checks of an operator that is traced within another one, whose own test compiles both.
INNER_RULES = ("test_schema", "test_autograd_registration", "test_faketensor")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the cache of plans: from here on, each call is checked and planned anew."""
    monkeypatch.setattr(calls, "_stored", {})
    # Disable the C++ path: its own cache would mix these calls with those before and after.
    native.path.clear()
    monkeypatch.setattr(native, "path", native.PYTHON)


def reschedule(monkeypatch: pytest.MonkeyPatch, **changes: Callable[[Any], Any]) -> None:
    """Change schedules: each of `changes` maps the result of the schedule function of its name."""
    for name, change in changes.items():
        norm = "batch_norm" if name == "geometry" else name.rpartition("_")[0]
        schedule = import_module(f"normplug._kernels.{norm}.schedule")
        chosen = getattr(schedule, name)
        monkeypatch.setattr(
            schedule,
            name,
            lambda *sizes, chosen=chosen, change=change: change(chosen(*sizes)),
        )
    forget(monkeypatch)


def use_64_bit_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the offsets that tensors of 2^31 or more values need."""
    from normplug import _kernels

    monkeypatch.setattr(_kernels, "_INT32", 0)
    forget(monkeypatch)


def use_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send eager calls through the operators that compilers see."""
    monkeypatch.setattr(can_run, "is_compiling", lambda: True)
    forget(monkeypatch)


def use_operators_for_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have compilers use the operators even for small inputs."""
    for norm in (batch_norms, row_norms, group_norms):
        monkeypatch.setattr(norm, "_OPERATOR_BYTES", 0)


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Record the addresses passed to launches from now on, by their names in the kernel."""
    from normplug._kernels.launch import Launch

    if torch.cuda.is_available():  # there the C++ path launches without Python
        native.start()
        monkeypatch.setattr(native, "path", native.PYTHON)
    given: list[dict[str, int]] = []
    call = Launch.__call__

    def watched(launch: Any, stream: int, *tensors: Tensor) -> None:
        pairs = zip(launch._kernel.arg_names, tensors, strict=False)
        given.append({name.removesuffix("_ptr"): t.data_ptr() for name, t in pairs})
        call(launch, stream, *tensors)

    monkeypatch.setattr(Launch, "__call__", watched)
    return given


def is_cpp(y: Any) -> bool:
    """Whether y has an autograd node of the C++ path."""
    return y.grad_fn is not None and y.grad_fn.name() == "NormBackward"


def both_ways(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return `compute()`, which must give the same bits by the C++ path and the Python path.

    The first C++ calls differ from later ones: they ask Python for what they have not cached.
    """
    found = [compute() for _ in range(4 if torch.cuda.is_available() else 2)]
    with native.python_way():
        python = compute()
    for cpp in found:
        assert cpp.keys() == python.keys()
        for name, value in python.items():
            assert_same(name, cpp[name], value)
    return python


def assert_same(name: str, one: Any, other: Any) -> None:
    """Assert equal values; for tensors equal dtypes, strides and bits, so that NaN equals NaN."""
    if not isinstance(other, Tensor):
        assert one == other, name
        return
    assert (one.dtype, one.shape, one.stride()) == (
        other.dtype,
        other.shape,
        other.stride(),
    ), name
    assert one.requires_grad == other.requires_grad, name
    assert torch.equal(_bits(one), _bits(other)), name


def _bits(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(kinds[t.element_size()])


def by_kernels(t: Tensors, spec: Any) -> Any:
    """Run a call of any norm by normplug's kernels."""
    return calls.call("test", t, spec, "triton")


def change_tiles(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Change the tiles of launches that are created from now on."""
    from normplug._kernels.launch import Launch

    start = Launch.__init__

    def changed(launch: Any, kernel: Any, work: Any, *args: Any, **numbers: Any) -> None:
        start(launch, kernel, work._replace(tile=change(work.tile)), *args, **numbers)

    monkeypatch.setattr(Launch, "__init__", changed)
    forget(monkeypatch)


def merge_two_at_a_time(monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Merge two parts at a time, where kernels merge more; `names` are fields of their tiles.

    It returns the names that a tile has had, once there are launches.
    """
    import triton.language as tl

    from normplug import _kernels
    from normplug._kernels import merging

    seen: set[str] = set()

    def by_twos(tile: Any) -> Any:
        smaller = {name: min(vars(tile)[name], 2) for name in names if name in vars(tile)}
        seen.update(smaller)
        return replace(tile, **smaller)

    change_tiles(monkeypatch, by_twos)
    monkeypatch.setattr(_kernels, "FAN_IN", 2)
    monkeypatch.setattr(merging, "FAN_IN", tl.constexpr(2))
    return seen


def assert_counters_are_zero() -> None:
    """Assert it for every workspace on the GPU, after all launches."""
    from normplug._kernels.launch import Workspace

    torch.cuda.synchronize()
    assert Workspace._kept
    assert not any(kept.counters.any() for kept in Workspace._kept.values())


def watch_recomputed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the results that backwards recompute from now on."""
    made: list[Tensor] = []
    plain = recompute._recomputation

    def watched(y: Any) -> Callable[[], Tensor] | None:
        make = plain(y)

        def recorded() -> Tensor:
            assert make is not None
            made.append(make())
            return made[-1]

        return None if make is None else recorded

    monkeypatch.setattr(recompute, "_recomputation", watched)
    return made


def recomputed(y: Any) -> Tensor:
    """Recompute y from its saved tensors."""
    make = recompute._recomputation(y)
    assert make is not None
    return make()


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the statistics by kernel, in the interpreter too."""
    return batch_norms.channel_stats(x, "triton")


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    mode: Any = "golden",
    residual: Tensor | None = None,
    activation: str | None = None,
    pool: Pool | None = None,
    num_batches_tracked: Tensor | None = None,
    backend: str = "triton",
    keeps_residual: bool = False,
) -> Tensor:
    """`functional.batch_norm` with arguments that only fused models pass; pooling implies ReLU."""
    t = Tensors(
        x, residual, weight, bias, None, running_mean, running_var, num_batches_tracked
    )
    activation = activation if pool is None else "relu"
    spec = BatchNormSpec(
        training, momentum, eps, target_variance(mode), activation, pool, keeps_residual
    )
    return calls.call("functional.batch_norm", t, spec, backend)


def check_operators(cases: Any, case: Any, device: str, compiles: bool = True) -> None:
    """Run `torch.library.opcheck` on the differentiable operator and its forward and backward.

    compiles: whether it also compares the compiled operator with the eager one.
    """
    tensors = cases.make(case, device)
    of_batch = hasattr(case, "training")
    running = {} if of_batch and case.training else tensors.running(tracked=not of_batch)
    count = running.pop("num_batches_tracked", None)
    t = Tensors(**tensors.inputs(case.needs), **running, tracked=count)
    operators, numbers = cases.operators(case)
    spec = operators.spec_of(*numbers)
    text = to_text(spec)
    rules = (*INNER_RULES, "test_aot_dispatch_dynamic") if compiles else INNER_RULES
    for automatic in (False, True) if hasattr(spec, "traced") else (False,):
        arguments = (*t, *numbers, automatic)
        torch.library.opcheck(operators.differentiable, arguments, test_utils=rules)
    bare = Tensors(*(each if each is None else each.detach() for each in t))
    torch.library.opcheck(operators.forward, (*bare, text), test_utils=INNER_RULES)
    outputs = operators.forward(*bare, text)
    x, residual, *vectors = bare[:5]
    has_residual = residual is not None
    needs = [each is not None and each.requires_grad for each in t[:5]]
    state = outputs[1:]
    if operators.has_total:
        x, *state = state
        needs[0], needs[1], has_residual = needs[0] or needs[1], False, False
    elif has_residual and spec.activation is None:
        # The residual's gradient would be dy itself.
        needs[1] = False
    kept = residual if has_residual and backward_reads_input(spec.activation) else None
    dys = tensors.dy, tensors.dtotal
    arguments = (*dys, x, kept, *vectors, *state, text, flags_of(has_residual, needs))
    torch.library.opcheck(operators.backward, arguments, test_utils=INNER_RULES)


def watch_fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the ops that norms fuse from now on, in order; the CPU counts as a GPU.

    Within `native.python_way`: the C++ path would run stored calls without what records them.
    """
    made: list[str] = []

    def watched(caller: str, t: Tensors, spec: Any, *args: Any, **options: Any) -> Any:
        if isinstance(spec, LayerNormSpec):
            made.extend(["scale and shift"] * spec.adaptive)
            made.extend(["add before"] * (t.residual is not None and spec.gate is None))
            made.extend(["bias before"] * (t.input_bias is not None))
        elif isinstance(spec, BatchNormSpec) and spec.pool is not None:
            made.append("relu, max pool")
        elif t.input_bias is not None:
            made.append(f"add norm, {spec.activation}")
        elif t.residual is not None:
            made.append(f"add, {spec.activation}")
        elif spec.activation is not None:
            made.append(spec.activation)
        return calls.call(caller, t, spec, *args, **options)

    monkeypatch.setattr(can_run, "has_kernels", lambda caller, backend, x: True)
    monkeypatch.setattr(base, "call", watched)
    return made
