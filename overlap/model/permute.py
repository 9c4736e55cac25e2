"""Move token copies into expert order and back. Both directions, and both backwards, are gathers.

A scatter-add into zeros would give the same numbers but turn -0.0 into +0.0 and, on a GPU, sum in any order.
Legend: T tokens, k copies per token, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.dispatch import Routing
from overlap.model.custom import apply


def permute(tokens: Tensor, routing: Routing) -> Tensor:
    """Copy each token once per chosen expert, in expert order: [T, C] -> [T*k, C]."""
    return apply(_Permute, tokens, routing.source, routing.inverse, routing.topk)


def unpermute(rows: Tensor, routing: Routing) -> Tensor:
    """Sum the rows of each token, in slot order: [T*k, C] -> [T, C]. The transpose of permute()."""
    return apply(_Unpermute, rows, routing.source, routing.inverse, routing.topk)


def reorder(weights: Tensor, routing: Routing) -> Tensor:
    """Bring one value per copy into expert order: [T, k] -> [T*k]."""
    return apply(_Permute, weights.flatten(), routing.source, routing.inverse, 1)


def unpermute_adjoint(grad: Tensor, routing: Routing) -> Tensor:
    """Gradient of unpermute()'s rows: [T, C] -> [T*k, C]."""
    return _spread(grad, routing.source, routing.topk)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return _spread(tokens, source, topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse, ctx.topk), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(source)
        ctx.topk = topk
        return _gather(rows, inverse, topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return _spread(grad, source, ctx.topk), None, None, None


def _spread(tokens: Tensor, source: Tensor, topk: int) -> Tensor:
    return tokens.index_select(0, source // topk if topk > 1 else source)


def _gather(rows: Tensor, inverse: Tensor, topk: int) -> Tensor:
    copies = rows.index_select(0, inverse)
    return copies.view(copies.shape[0] // topk, topk, *copies.shape[1:]).sum(1) if topk > 1 else copies
