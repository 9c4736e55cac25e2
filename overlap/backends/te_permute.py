"""Token copies into expert order and back by the kernels of te.moe_permute and te.moe_unpermute (backend te-modules).

te.moe_permute sorts by itself, in every pass. Its kernels read a table of rows per token; here that is made of the
pinned routing (R7), so nothing is sorted again and rows lie as they always do. Rows are copied bit by bit, and sums are
taken in slot order in float32. At their first call for a width they try block sizes, and the host waits.
With a capacity some rows hold no copy, which the kernels would not write: there the model's own kernels stay.
Legend: T tokens, k copies per token, N rows, C width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformer_engine.pytorch.triton import permutation as kernels

from overlap.dispatch import Routing
from overlap.model.custom import apply
from overlap.model.permute import Permutation


class TEPermutation(Permutation):
    """In the place of model.permute.Permutation."""

    def permute(self, tokens: Tensor, routing: Routing) -> Tensor:
        """[T, C] -> [N, C]."""
        if routing.capacity is not None:
            return super().permute(tokens, routing)
        return apply(_Move, tokens, routing.inverse, routing.topk, True)

    def unpermute(self, rows: Tensor, routing: Routing) -> Tensor:
        """[N, C] -> [T, C]."""
        if routing.capacity is not None:
            return super().unpermute(rows, routing)
        return apply(_Move, rows, routing.inverse, routing.topk, False)

    def unpermute_adjoint(self, grad: Tensor, routing: Routing) -> Tensor:
        """[T, C] -> [N, C]."""
        if routing.capacity is not None:
            return super().unpermute_adjoint(grad, routing)
        return _copy(grad, routing.inverse, routing.topk)


class _Move(Function):
    """Copies go there, sums come back; a gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, topk: int, there: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk, ctx.there = topk, there
        return (_copy if there else _sum)(x, inverse, topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return (_sum if ctx.there else _copy)(grad, inverse, ctx.topk), None, None, None


def _copy(tokens: Tensor, inverse: Tensor, topk: int) -> Tensor:
    """Each token to its rows: [T, C] -> [N, C]."""
    table, (count, width) = _table(inverse, topk), tokens.shape
    rows: Tensor = kernels.permute_with_mask_map(
        tokens, table, None, None, None, count, topk, inverse.numel(), width, None
    )[0]
    return rows


def _sum(rows: Tensor, inverse: Tensor, topk: int) -> Tensor:
    """The rows of each token: [N, C] -> [T, C]."""
    table = _table(inverse, topk)
    tokens: Tensor = kernels.unpermute_with_mask_map(
        rows, table, None, None, None, len(table), topk, rows.shape[1]
    )[0]  # fmt: skip
    return tokens


def _table(inverse: Tensor, topk: int) -> Tensor:
    """[T, 2k+1] int32, as the kernels read it for k experts: a token's rows, their experts, how many rows.

    The experts are only read with probabilities or padding.
    """
    return F.pad(inverse.view(-1, topk), (0, topk + 1), value=topk)
