"""A norm's kernels as differentiable `torch.library` operators, opaque to compilers.

Eager calls do not use them: dispatching an operator costs more than launching a kernel.

`torch.library.custom_op` runs Python code of its own before each call, and more if the operator has
gradients, so a dispatch takes twice the time. Here an operator is only a function and its fake
implementation. Its gradients come from an `autograd.Function` around it. That function is
registered as a second operator, a composite one, which compilers decompose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normplug._ops.call import plan_of
from normplug._ops.spec import Tensors

_library = torch.library.Library("normplug", "FRAGMENT")
_TENSORS = len(Tensors._fields)
_INPUTS = 5  # the first five, which have gradients
_AFFINE = "Tensor? residual, Tensor? weight, Tensor? bias, Tensor? input_bias"
_RUNNING = "Tensor? running_mean, Tensor? running_var, Tensor? tracked"
_UPDATED = "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? tracked"


class NormOperators:
    """The operators of one norm: NAME_forward, NAME_backward, and NAME, which has gradients.

        forward(*Tensors, *numbers) -> (y, [total,] *state)
        backward(dy, dtotal, x, residual, weight, bias, input_bias, *state, has_residual, *numbers,
                 needs) -> the gradients of these five, empty where not needed

    If a norm has a total, the backward takes it as x, without a residual.

    Args:
        name: in the namespace "normplug".
        numbers: the schema of the spec's fields.
        state: the names of the tensors that the forward computes for the backward.
        spec: makes the spec from the numbers that an operator takes.
        has_total: whether the forward returns x + residual as well.
        updates_running: whether the forward updates the running statistics.
    """

    def __init__(
        self,
        name: str,
        numbers: str,
        state: Sequence[str],
        spec: Callable[..., Any],
        *,
        has_total: bool = False,
        updates_running: bool = False,
    ) -> None:
        self.spec, self.has_total = spec, has_total
        self.results = 2 if has_total else 1  # y, and the total
        inputs = f"(Tensor x, {_AFFINE}, {_UPDATED if updates_running else _RUNNING}, {numbers})"
        outputs = ", ".join(["Tensor"] * (self.results + len(state)))
        kept = ", ".join(f"Tensor {name}" for name in state)
        forward = f"{inputs} -> ({outputs})"
        backward = (
            f"(Tensor dy, Tensor? dtotal, Tensor x, {_AFFINE}, {kept}, bool has_residual, "
            f"{numbers}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
        )
        self._states = len(state)
        self.forward = self._define(f"{name}_forward", forward, self._forward)
        self.backward = self._define(f"{name}_backward", backward, self._backward)
        torch.library.register_fake(self.forward._name, self._fake_forward, lib=_library)
        torch.library.register_fake(self.backward._name, self._fake_backward, lib=_library)
        apply = partial(_Differentiable.apply, self)
        self.differentiable = self._define(name, forward, apply, "CompositeImplicitAutograd")

    @staticmethod
    def _define(
        name: str, schema: str, function: Callable[..., Any], key: str = "CompositeExplicitAutograd"
    ) -> Any:
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, key)
        return getattr(torch.ops.normplug, name).default

    def _forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        t, spec = Tensors(*arguments[:_TENSORS]), self.spec(*arguments[_TENSORS:])
        plan, t = plan_of(t, spec)
        result, saved = plan.forward(t, True)
        results, state = result if self.has_total else (result,), saved[_INPUTS:]
        none = t.x.new_empty(0, dtype=torch.uint8)
        return (*results, *(none if each is None else each for each in state))

    def _fake_forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        return self.spec(*arguments[_TENSORS:]).fake(Tensors(*arguments[:_TENSORS]))

    def _backward(self, dy: Tensor, dtotal: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        (x, residual, *vectors), state, has_residual, spec, needs = self._parts(arguments)
        # The residual is saved only if the backward reads it; otherwise x is its placeholder.
        is_placeholder = has_residual and residual is None
        t = Tensors(x, x if is_placeholder else residual, *vectors)
        plan, t = plan_of(t, spec)
        found = (None if each.numel() == 0 else each for each in state)
        saved = (t.x, None if is_placeholder else t.residual, *vectors, *found)
        gradients = plan.backward(saved, dy, dtotal, tuple(needs))
        return tuple(x.new_empty(0) if g is None else g for g in gradients)

    def _fake_backward(self, dy: Tensor, dtotal: Tensor | None, *arguments: Any) -> Any:
        (x, _, *vectors), _, has_residual, spec, needs = self._parts(arguments)
        dx = spec.fake_dx(x)
        like = (dx, dx if has_residual else None, *vectors)
        return tuple(
            torch.empty_like(t) if need and t is not None else x.new_empty(0)
            for t, need in zip(like, needs, strict=True)
        )

    def _parts(self, arguments: Sequence[Any]) -> tuple[Any, Any, bool, Any, Sequence[bool]]:
        """Inputs, state, has_residual, spec and needs of a backward."""
        after = _INPUTS + self._states
        inputs, state = arguments[:_INPUTS], arguments[_INPUTS:after]
        has_residual, *numbers, needs = arguments[after:]
        return inputs, state, has_residual, self.spec(*numbers), needs


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operators: NormOperators, *arguments: Any) -> tuple[Tensor, ...]:
        outputs = operators.forward(*arguments)
        x, residual, *vectors = arguments[:_INPUTS]
        ctx.operators, ctx.numbers = operators, arguments[_TENSORS:]
        ctx.spec = operators.spec(*ctx.numbers)
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.has_residual = residual is not None and not operators.has_total
        kept = residual if ctx.has_residual and ctx.spec.reads_residual else None
        constant = state = outputs[operators.results :]
        if operators.has_total:
            x = outputs[1]
            if not any(ctx.needs_input_grad[1:3]):
                constant = outputs[1:]
        ctx.save_for_backward(x, kept, *vectors, *state)
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        operators = ctx.operators
        for_x, for_residual, *rest = needs = ctx.needs_input_grad[1 : 1 + _INPUTS]
        dtotal, alias = None, ctx.has_residual and ctx.spec.passes_dy
        if operators.has_total:
            dtotal = others[0]
            asked = [for_x or for_residual, False, *rest]
        else:
            asked = [for_x, for_residual and not alias, *rest]
        through, dresidual, *gradients = operators.backward(
            dy, dtotal, *ctx.saved_tensors, ctx.has_residual, *ctx.numbers, asked
        )
        dx: Tensor = through
        if operators.has_total:
            # One result serves both gradients: an operator's results must not share memory.
            dx = through.to(ctx.dtypes[0])
            dresidual = through.to(ctx.dtypes[1])
        elif alias:
            dresidual = dy
        found = (dx, dresidual, *gradients)
        wanted = (g if need else None for g, need in zip(found, needs, strict=True))
        return (None, *wanted, *[None] * (_TENSORS - _INPUTS + len(ctx.numbers)))
