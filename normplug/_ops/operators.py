"""A norm's kernels as differentiable `torch.library` operators, opaque to compilers.

Eager calls do not use them: dispatching an operator costs more than launching a kernel.

`torch.library.custom_op` runs Python code of its own before each call, and more if the operator has
gradients, so a dispatch takes twice the time. Here an operator is only a function and its fake
implementation. Its gradients come from an `autograd.Function` around it. That function is
registered as a second operator, a composite one, which compilers decompose.

The dispatcher takes the host about 0.3 us for each argument. So the operators that remain in a
compiled graph take the spec as one string, and the host path in C++ implements them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normplug import native
from normplug._activations import backward_reads_input
from normplug._ops.call import plan_of
from normplug._ops.spec import Tensors, from_text, to_text
from normplug._torch import is_matmul_output

_library = torch.library.Library("normplug", "FRAGMENT")
_TENSORS = len(Tensors._fields)
_INPUTS = 5  # the first five, which have gradients
_AFFINE = "Tensor? residual, Tensor? weight, Tensor? bias, Tensor? input_bias"
_RUNNING = "Tensor? running_mean, Tensor? running_var, Tensor? tracked"
_UPDATED = "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? tracked"


class NormOperators:
    """The operators of one norm: NAME_forward, NAME_backward, and NAME, which has gradients.

        forward(*Tensors, spec) -> (y, [total,] *state)
        backward(dy, dtotal, x, residual, weight, bias, input_bias, *state, spec, flags) -> the
            gradients of these five that are needed
        NAME(*Tensors, *numbers, automatic) -> (y, [total,] *state)

    If a norm has a total, the backward takes it as x, without a residual. `spec` is the text of a
    spec, and `flags_of` makes the flags. If `automatic`, PyTorch's operations run a call, unless x
    or the residual comes from a matrix multiplication or a convolution, which a compiler does not
    fuse with the norm. Without a total, they run the forward even then: `traced(t)` of the spec.

    Args:
        name: in the namespace "normplug".
        spec_type: the class of the norm's specs.
        spec_of: makes a spec from the numbers.
        numbers: the schema of the numbers.
        state: the names of the tensors that the forward computes for the backward.
        has_total: whether the forward returns x + residual as well.
        updates_running: whether the forward updates the running statistics.
    """

    def __init__(
        self,
        name: str,
        spec_type: type,
        spec_of: Callable[..., Any],
        numbers: str,
        state: Sequence[str],
        *,
        has_total: bool = False,
        updates_running: bool = False,
    ) -> None:
        self.has_total = has_total
        self.results = 1 + has_total  # y, and the total
        self.spec_of = spec_of
        self._spec_type = spec_type
        self._states = len(state)
        tensors = f"Tensor x, {_AFFINE}, {_UPDATED if updates_running else _RUNNING}"
        outputs = ", ".join(["Tensor"] * (self.results + len(state)))
        kept = ", ".join(f"Tensor {name}" for name in state)
        read = (
            f"Tensor dy, Tensor? dtotal, Tensor x, {_AFFINE}, {kept}, str spec, int flags"
        )
        forward = f"({tensors}, str spec) -> ({outputs})"
        self.forward = self._define(f"{name}_forward", forward, self._forward)
        self.backward = self._define(
            f"{name}_backward", f"({read}) -> Tensor[]", self._backward
        )
        torch.library.register_fake(self.forward._name, self._fake_forward, lib=_library)
        torch.library.register_fake(
            self.backward._name, self._fake_backward, lib=_library
        )
        native.implement(name)
        whole = f"({tensors}, {numbers}, bool automatic) -> ({outputs})"
        self.differentiable = self._define(
            name, whole, self._call, "CompositeImplicitAutograd"
        )

    @staticmethod
    def _define(
        name: str,
        schema: str,
        function: Callable[..., Any],
        key: str = "CompositeExplicitAutograd",
    ) -> Any:
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, key)
        return getattr(torch.ops.normplug, name).default

    def _call(self, *arguments: Any) -> tuple[Tensor, ...]:
        t, (*numbers, automatic) = Tensors(*arguments[:_TENSORS]), arguments[_TENSORS:]
        if automatic and not any(is_matmul_output(x) for x in t[:2] if x is not None):
            result = self.spec_of(*numbers).by_torch(t)
            results = result if self.has_total else (result,)
            state = [t.x.new_empty(0)] * self._states
            return (*results, *state)
        return _Differentiable.apply(self, *arguments)

    def _forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, text = arguments
        plan, ready = self._plan_of(Tensors(*tensors), text)
        result, saved = plan.forward(ready, True)
        results = result if self.has_total else (result,)
        state = saved[_INPUTS:]
        none = ready.x.new_empty(0, dtype=torch.uint8)
        return (*results, *(none if each is None else each for each in state))

    def _fake_forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, text = arguments
        outputs: tuple[Tensor, ...] = self._spec(text).fake(Tensors(*tensors))
        return outputs

    def _backward(
        self, dy: Tensor, dtotal: Tensor | None, *arguments: Any
    ) -> list[Tensor]:
        (x, residual, *vectors), state, text, has_residual, needs = self._parts(arguments)
        # The residual is saved only if the backward reads it; otherwise x is its placeholder.
        is_placeholder = has_residual and residual is None
        t = Tensors(x, x if is_placeholder else residual, *vectors)
        plan, ready = self._plan_of(t, text)
        state = (None if t.numel() == 0 else t for t in state)
        saved = (ready.x, None if is_placeholder else ready.residual, *vectors, *state)
        gradients = plan.backward(saved, dy, dtotal, needs)
        return [g for g in gradients if g is not None]

    def _fake_backward(
        self, dy: Tensor, dtotal: Tensor | None, *arguments: Any
    ) -> list[Tensor]:
        (x, residual, *vectors), _, text, has_residual, needs = self._parts(arguments)
        dx = self._spec(text).fake_dx(x)
        dresidual = dx if has_residual else None
        if dresidual is not None and residual is not None:
            dresidual = torch.empty_like(dx, dtype=residual.dtype)
        like = (dx, dresidual, *vectors)
        pairs = zip(like, needs, strict=True)
        return [torch.empty_like(t) for t, need in pairs if need and t is not None]

    def _spec(self, text: str) -> Any:
        return from_text(self._spec_type, text)

    def _plan_of(self, t: Tensors, text: str) -> tuple[Any, Tensors]:
        """The plan of an operator's call, and the tensors that the plan takes."""
        plan, ready = plan_of(t, self._spec(text))
        native.path.store_operator(text, t, ready, plan)
        return plan, ready

    def _parts(self, arguments: Sequence[Any]) -> tuple[Any, Any, str, bool, Any]:
        """Inputs, state, spec, has_residual and needs of a backward."""
        *tensors, text, flags = arguments
        has_residual, *needs = (bool(flags >> i & 1) for i in range(1 + _INPUTS))
        return tensors[:_INPUTS], tensors[_INPUTS:], text, has_residual, tuple(needs)


def flags_of(has_residual: bool, needs: Sequence[bool]) -> int:
    """The `flags` of a backward: bit 0 is `has_residual`, bit 1 + i the need of input i."""
    return sum(flag << i for i, flag in enumerate((has_residual, *needs)))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operators: NormOperators, *arguments: Any
    ) -> tuple[Tensor, ...]:
        t, (*numbers, automatic) = Tensors(*arguments[:_TENSORS]), arguments[_TENSORS:]
        ctx.others = [None] * (len(arguments) - _INPUTS)
        ctx.operators = operators
        ctx.spec = operators.spec_of(*numbers)
        ctx.text = to_text(ctx.spec)
        traced = automatic and not operators.has_total
        outputs = ctx.spec.traced(t) if traced else operators.forward(*t, ctx.text)
        x, residual, *vectors = arguments[:_INPUTS]
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.has_residual = residual is not None and not operators.has_total
        reads = ctx.has_residual and backward_reads_input(ctx.spec.activation)
        kept = residual if reads else None
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
        # Without an activation, the residual's gradient is dy, which an operator must not return.
        dtotal = None
        alias = ctx.has_residual and ctx.spec.activation is None
        if operators.has_total:
            dtotal = others[0]
            asked = [for_x or for_residual, False, *rest]
        else:
            asked = [for_x, for_residual and not alias, *rest]
        saved = ctx.saved_tensors
        flags = flags_of(ctx.has_residual, asked)
        made = (
            operators.backward(dy, dtotal, *saved, ctx.text, flags) if any(asked) else []
        )
        made = iter(made)
        through, dresidual, *gradients = (next(made) if need else None for need in asked)
        dx = through
        if operators.has_total and through is not None:
            # One result serves both gradients: an operator's results must not share memory.
            dx = through.to(ctx.dtypes[0])
            dresidual = through.to(ctx.dtypes[1]) if for_residual else None
        elif alias:
            dresidual = dy
        pairs = zip((dx, dresidual, *gradients), needs, strict=True)
        return (None, *(g if need else None for g, need in pairs), *ctx.others)
