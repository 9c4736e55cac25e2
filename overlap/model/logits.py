"""Router logits: a product of narrow tensors, computed and kept in float32.

On a GPU one product takes narrow factors and gives a wide result: products of bfloat16 numbers are exact in float32, so
nothing is lost beside a product of casts. Backward casts again what it needs; the graph keeps no wide copy.
Legend: T tokens, C hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from overlap.model.custom import apply
from overlap.model.fused import fused
from overlap.model.precision import wide_dtype


def wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Matrix product x weight^T in float32 (float64 where x is), inside autocast too.

    Args:
        x: [T, C].
        weight: [E, C].

    Returns:
        [T, E]; gradients have the types of the arguments.
    """
    return apply(_WideLogits, x, weight)


class _WideLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # a frozen weight needs no input, a first stage's input no weight
        ctx.save_for_backward(*_needed(ctx, x, weight))
        ctx.types = x.dtype, weight.dtype
        wide = wide_dtype(x.dtype)
        if _one_product(x, weight):
            return torch.mm(x, weight.t(), out_dtype=wide)
        # autocast would compute the scores in the narrow type
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else grad.mm(weight.to(grad.dtype)).to(ctx.types[0])
        grad_weight = None if x is None else grad.t().mm(x.to(grad.dtype)).to(ctx.types[1])
        return grad_x, grad_weight


def _needed(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    for_x, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    return x if for_weight else None, weight if for_x else None


def _one_product(x: Tensor, weight: Tensor) -> bool:
    """Whether the device multiplies the narrow tensors as they are."""
    return x.dtype == weight.dtype == torch.bfloat16 and fused(x)
