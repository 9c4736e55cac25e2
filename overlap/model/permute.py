"""Move token copies into expert order and back. Both directions, and both backwards, are gathers.

A scatter-add into zeros would give the same numbers but turn -0.0 into +0.0 and, on a GPU, sum in any order.
With a capacity some rows hold no copy and some copies have no row: both read zeros, forward and backward.
Where kernels of our own apply, sums are taken in slot order in float32; torch's sum() is free in its order.
Legend: T tokens, k copies per token, N rows, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from overlap.dispatch import Routing
from overlap.model.custom import apply
from overlap.model.fused import fused, kernels
from overlap.model.graph_only import placeholder


def permute(tokens: Tensor, routing: Routing) -> Tensor:
    """Copy each token once per chosen expert, in expert order: [T, C] -> [N, C]."""
    return apply(_Permute, tokens, routing.token, routing.inverse, routing.topk, routing.capacity is not None)


def unpermute(rows: Tensor, routing: Routing) -> Tensor:
    """Sum the rows of each token, in slot order: [N, C] -> [T, C]. The transpose of permute()."""
    return apply(_Unpermute, rows, routing)


def reorder(weights: Tensor, routing: Routing) -> Tensor:
    """Bring one value per copy into expert order: [T, k] -> [N]."""
    return apply(_Permute, weights.flatten(), routing.source, routing.inverse, 1, routing.capacity is not None)


def unpermute_adjoint(grad: Tensor, routing: Routing) -> Tensor:
    """Gradient of unpermute()'s rows: [T, C] -> [N, C]."""
    return _select(grad, routing.token, routing.capacity is not None)


class Permutation(nn.Module):
    """The first of these as a layer uses them; a backend may put its own in this place."""

    def permute(self, tokens: Tensor, routing: Routing) -> Tensor:
        """[T, C] -> [N, C]."""
        return permute(tokens, routing)

    def unpermute(self, rows: Tensor, routing: Routing) -> Tensor:
        """[N, C] -> [T, C]."""
        return unpermute(rows, routing)

    def unpermute_adjoint(self, grad: Tensor, routing: Routing) -> Tensor:
        """[T, C] -> [N, C]."""
        return unpermute_adjoint(grad, routing)


def take_rows(rows: Tensor, order: Tensor, inverse: Tensor, *, graph_only: bool = False) -> Tensor:
    """Permute rows: row i of the result is row order[i]; the gradient is gathered by the inverse.

    With `graph_only` the rows are left where they are: the graph is the same, what is returned holds no numbers.
    """
    return apply(_TakeNothing if graph_only else _Take, rows, order, inverse)


class _TakeNothing(torch.autograd.Function):
    """_Take for nobody: with its graph, in the memory of one element."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return placeholder(rows, *rows.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gradients: tuple[Tensor, None, None] = _Take.backward(ctx, grad)
        return gradients


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, held: Tensor, inverse: Tensor, topk: int, gaps: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk, ctx.gaps = topk, gaps
        return _select(tokens, held, gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse, ctx.topk, ctx.gaps), None, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(routing.token)
        ctx.gaps = routing.capacity is not None
        return _gather(rows, routing.inverse, routing.topk, ctx.gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (token,) = ctx.saved_tensors
        return _select(grad, token, ctx.gaps), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _select(rows, order, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _select(grad, inverse, False), None, None


def _gather(rows: Tensor, inverse: Tensor, topk: int, gaps: bool) -> Tensor:
    """Sums of topk rows each; by a kernel of our own the rows are never side by side in memory."""
    if fused(rows):
        return _by_kernel(rows, inverse, topk)
    copies = _select(rows, inverse, gaps)
    return copies.view(copies.shape[0] // topk, topk, *copies.shape[1:]).sum(1) if topk > 1 else copies


def _select(x: Tensor, index: Tensor, gaps: bool) -> Tensor:
    """Rows of x by index; zeros where there are gaps and the index points past the end."""
    if fused(x):
        return _by_kernel(x, index, 1)
    if not gaps:
        return x.index_select(0, index)
    taken = x.index_select(0, index.clamp(max=x.shape[0] - 1))
    return taken.masked_fill_((index >= x.shape[0]).view(-1, *(1 for _ in x.shape[1:])), 0)


def _by_kernel(x: Tensor, index: Tensor, count: int) -> Tensor:
    out = x.new_empty(index.shape[0] // count, *x.shape[1:])
    kernels("triton_permute").gather(x, index, out, count)
    return out
