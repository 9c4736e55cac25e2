"""x weight^T in 8 bits, by Transformer Engine's kernels.

NOTE [ Quantised weights are not kept ]
Forward casts the weight in rows and backward casts it again, in columns: kept, both layouts would take as many bytes as
the weight, per layer and microbatch in flight (or once per step, if all microbatches shared them). The weight has not
changed and scales are constant within a step, so the numbers are the same.
Of the input, columns are kept, for the weight gradient; in bfloat16 it is not held.

NOTE [ One cast of an input that two products read ]
Where a cast depends on its tensor alone, both would make the same numbers. The second product gets the first one's cast
as an object of its own: each drops the rows when it has read them and saves the columns, in the same memory.
Legend: N rows, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from overlap.backends.te_casts import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Casts,
    again,
    cast,
    flat,
    keep_columns,
    make_casts,
    multiply,
)
from overlap.model.custom import apply
from overlap.model.linear import LateWeight, autocast_like, gradient_of_weight, graph_inputs, keep_weight


class Fp8Product:
    """x weight^T.

    Args:
        weight: [O, I]; tells its device.
        recipe: Transformer Engine's recipe.
        states: What te_scaling.make_state() gave for it.
    """

    def __init__(self, weight: Tensor, recipe: Any, states: nn.ModuleList) -> None:
        self._casts = make_casts(recipe, states, 1, weight.device)

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._of(weight, x, self._read(x, columns=_trains(weight)))

    def both(self, weight: Tensor, other: Fp8Product, other_weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Its product and another's, [..., I] -> [..., O] each, of one cast; neither may have scales of its own."""
        columns = _trains(weight) or _trains(other_weight)
        read = self._read(x, columns=columns)
        # Without columns nothing is dropped.
        first = _Read(quantised=again(read.quantised), dtype=read.dtype) if columns else read
        return self._of(weight, x, first), other._of(other_weight, x, read)

    def _read(self, x: Tensor, *, columns: bool) -> _Read:
        """Cast x, outside its graph."""
        rows = autocast_like(x.detach()).reshape(-1, x.shape[-1]).contiguous()
        casts = self._casts
        made = cast(rows, casts.inputs[0], rows=True, columns=columns, from_rows=casts.from_rows)
        return _Read(quantised=made, dtype=rows.dtype)

    def _of(self, weight: Tensor, x: Tensor, read: _Read) -> Tensor:
        return apply(_Linear, x, *graph_inputs(x, weight), self._casts, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """An input as a product reads it."""

    quantised: Any
    """The product's own: with a graph it drops the rows, or all."""
    dtype: torch.dtype
    """What is computed in."""


def _trains(weight: Tensor) -> bool:
    """Whether a graph that is recorded now keeps an input for this weight's gradient."""
    return torch.is_grad_enabled() and weight.requires_grad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, late: LateWeight | None, anchor: Tensor | None, casts: Casts, read: _Read
    ) -> Tensor:
        made = _weight(weight, casts, columns=False)
        y = multiply(made, read.quantised, FORWARD, read.dtype, accurate=casts.accurate_forward)
        kept = [read.quantised] if ctx.needs_input_grad[1] or late is not None else []
        keep_columns(kept)
        plain, ctx.restore = flat(kept)
        ctx.save_for_backward(weight, *plain)
        ctx.casts, ctx.shape = casts, x.shape
        keep_weight(ctx, weight, late)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, *plain = ctx.saved_tensors
        casts: Casts = ctx.casts
        inner, outer = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.late
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        read = cast(rows, casts.gradients[0], rows=inner, columns=outer, from_rows=casts.from_rows)
        grad_x = None
        if inner:
            grad_x = multiply(_weight(weight, casts, columns=True), read, INPUT_GRADIENT, rows.dtype).view(ctx.shape)
        if not outer:
            return grad_x, None, None, None, None, None
        keep_columns([read])
        tensors, restore = flat([*ctx.restore(*plain), read])
        gradient = gradient_of_weight(ctx, partial(_weight_gradient, restore, rows.dtype), *tensors)
        return grad_x, gradient, None, None, None, None


def _weight(weight: Tensor, casts: Casts, *, columns: bool) -> Any:
    return cast(weight, casts.weights[0], rows=not columns, columns=columns, from_rows=True)


def _weight_gradient(
    restore: Callable[..., list[Any]], compute_dtype: torch.dtype, *plain: Tensor | None, dtype: torch.dtype
) -> Tensor:
    x, grad = restore(*plain)
    gradient = multiply(x, grad, WEIGHT_GRADIENT, compute_dtype)
    # The graph, which outlives this, has the object that x was put together in: it would hold the columns.
    flat([x])
    return gradient.to(dtype)
