"""Routes forced, watched and counted: the only tests' file that knows the inside of `_ops`.

Import it after `pytest.importorskip("triton")` where a test needs the kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from normplug._ops import choice, recompute
from normplug._ops.aten import Pool

__all__ = ["HAS_RECOMPUTE", "NEEDS_RECOMPUTE", "Pool"]

HAS_RECOMPUTE = recompute.AVAILABLE
NEEDS_RECOMPUTE = pytest.mark.skipif(not HAS_RECOMPUTE, reason="needs torch 2.8")
ROUTES = ("batch_norm.eager", "batch_norm.pooled", "layer_norm.eager")


def _eager() -> list[Any]:
    return [import_module(f"normplug._ops.{name}") for name in ROUTES]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no call has been seen before: each is checked, and planned, again."""
    from normplug._ops.eligible import Plans

    for module in _eager():
        monkeypatch.setattr(module, "_plans", Plans(module._Plan))
    monkeypatch.setattr(choice, "_known", {})


def reschedule(monkeypatch: pytest.MonkeyPatch, **changes: Callable[[Any], Any]) -> None:
    """Cut every call into work as `changes` makes it of a schedule function's choice, by name."""
    from normplug._kernels import schedule

    for name, change in changes.items():
        chosen = getattr(schedule, name)
        monkeypatch.setattr(
            schedule, name, lambda *sizes, chosen=chosen, change=change: change(chosen(*sizes))
        )
    forget(monkeypatch)


def use_64_bit_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensors of 2^31 values and more need."""
    from normplug._kernels import schedule

    monkeypatch.setattr(schedule, "_INT32", 0)
    forget(monkeypatch)


def use_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send eager calls through the operators that compilers see."""
    monkeypatch.setattr(choice, "_compiling", lambda: True)
    forget(monkeypatch)


def use_operators_for_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a compiler operators however small the input is."""
    for kind in ("BATCH_NORM", "LAYER_NORM", "ADD_LAYER_NORM"):
        monkeypatch.setattr(choice, f"_{kind}_OPERATOR_BYTES", 0)


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The addresses that launches from now on are given, by their names in the kernel."""
    from normplug._kernels.launch import Launch

    given: list[dict[str, int]] = []
    call = Launch.__call__

    def watched(launch: Any, stream: int, *tensors: Tensor) -> None:
        pairs = zip(launch._kernel.arg_names, tensors, strict=False)
        given.append({name.removesuffix("_ptr"): t.data_ptr() for name, t in pairs})
        call(launch, stream, *tensors)

    monkeypatch.setattr(Launch, "__call__", watched)
    return given


def watch_compiled(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda constants: constants,
) -> list[dict[str, Any]]:
    """The constants of launches that are made from now on, as `change` makes them."""
    from normplug._kernels.launch import Launch

    made: list[dict[str, Any]] = []
    start = Launch.__init__
    parameters = inspect.signature(start)

    def watched(*args: Any, **options: Any) -> None:
        bound = parameters.bind(*args, **options)
        made.append(change(bound.arguments["constants"]))
        bound.arguments["constants"] = made[-1]
        start(*bound.args, **bound.kwargs)

    monkeypatch.setattr(Launch, "__init__", watched)
    forget(monkeypatch)
    return made


def watch_workspaces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workspaces that are made from now on."""
    from normplug._kernels.launch import Workspace

    made: list[Any] = []
    start = Workspace.__init__

    def watched(work: Any, *sizes: Any) -> None:
        made.append(work)
        start(work, *sizes)

    monkeypatch.setattr(Workspace, "__init__", watched)
    return made


def assert_counters_are_zero() -> None:
    """In the workspaces of the GPU, after all launches."""
    from normplug._kernels.launch import Workspace

    torch.cuda.synchronize()
    assert Workspace._kept
    assert not any(kept.counters.any() for kept in Workspace._kept.values())


def watch_recomputed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The results that backwards recompute from now on."""
    made: list[Tensor] = []
    for module in _eager():
        plain = getattr(module._Plan, "again", None)
        if plain is not None:

            def watched(plan: Any, *tensors: Any, plain: Any = plain) -> Tensor:
                made.append(plain(plan, *tensors))
                return made[-1]

            monkeypatch.setattr(module._Plan, "again", watched)
    return made


def recomputed(y: Any) -> Tensor:
    """y again, from what its backward has."""
    return y.grad_fn._forward_cls.recompute(y.grad_fn)


def is_recomputable(y: Any) -> bool:
    """Whether the backward of y has all that y can be recomputed from."""
    return y.grad_fn._forward_cls.is_recomputable(y.grad_fn)


def is_pooled_by_kernel(y: Any) -> bool:
    return type(y.grad_fn).__name__ == "_BatchNormPoolBackward"


def refusal_to_pool(x: Tensor, vectors: tuple[Tensor | None, ...], pool: Pool) -> str | None:
    """Why the kernels cannot normalise and pool x."""
    from normplug._ops.batch_norm import pooled

    return pooled.refusal(x, None, vectors, pool)


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """By kernel, in the interpreter too."""
    from normplug._ops.batch_norm import eager

    return eager.channel_stats(x)
