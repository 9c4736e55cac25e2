"""x weight^T in 8 bits, by Transformer Engine's kernels.

NOTE [ Quantised weights are not kept ]
Forward casts the weight in rows and backward casts it again, in columns: kept, both layouts would take as many bytes as
the weight, per layer and microbatch in flight (or once per step, if all microbatches shared them). The weight has not
changed and scales are constant within a step, so the numbers are the same.
Of the input, columns are kept, for the weight gradient; in bfloat16 it is not held.
Legend: N rows, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Callable
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
        return apply(_Linear, x, *graph_inputs(x, weight), self._casts)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, late: LateWeight | None, anchor: Tensor | None, casts: Casts
    ) -> Tensor:
        rows = autocast_like(x).reshape(-1, x.shape[-1]).contiguous()
        keeps = ctx.needs_input_grad[1] or late is not None
        read = cast(rows, casts.inputs[0], rows=True, columns=keeps, from_rows=casts.from_rows)
        y = multiply(_weight(weight, casts, columns=False), read, FORWARD, rows.dtype, accurate=casts.accurate_forward)
        if keeps:
            keep_columns([read])
        plain, ctx.restore = flat([read] if keeps else [])
        ctx.save_for_backward(weight, *plain)
        ctx.casts, ctx.shape = casts, x.shape
        keep_weight(ctx, weight, late)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weight, *plain = ctx.saved_tensors
        casts: Casts = ctx.casts
        inner, outer = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.late
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        read = cast(rows, casts.gradients[0], rows=inner, columns=outer, from_rows=casts.from_rows)
        grad_x = None
        if inner:
            grad_x = multiply(_weight(weight, casts, columns=True), read, INPUT_GRADIENT, rows.dtype).view(ctx.shape)
        if not outer:
            return grad_x, None, None, None, None
        keep_columns([read])
        tensors, restore = flat([*ctx.restore(*plain), read])
        gradient = gradient_of_weight(ctx, partial(_weight_gradient, restore, rows.dtype), *tensors)
        return grad_x, gradient, None, None, None


def _weight(weight: Tensor, casts: Casts, *, columns: bool) -> Any:
    return cast(weight, casts.weights[0], rows=not columns, columns=columns, from_rows=True)


def _weight_gradient(
    restore: Callable[..., list[Any]], compute_dtype: torch.dtype, *plain: Tensor | None, dtype: torch.dtype
) -> Tensor:
    x, grad = restore(*plain)
    return multiply(x, grad, WEIGHT_GRADIENT, compute_dtype).to(dtype)
