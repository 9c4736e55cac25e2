"""One product per expert over rows sorted by expert, in 8 bits, by Transformer Engine's kernels.

Experts are taken a few at a time: what is cast for them is let go before the next. See te_linear for what is kept.
Rows of an expert are padded to a multiple there too, so that no padded copy of the whole exists.
Legend: N rows sorted by expert, E experts, I and O inner and outer width, W expert width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from overlap.backends.te_backward import Backward
from overlap.backends.te_casts import FORWARD, Casts, cast_split, flat, keep_columns, make_casts, multiply_each
from overlap.backends.te_pieces import Limits, Piece, Rows, busy_pieces, to_fill
from overlap.backends.te_together import cast_rows, cast_weights
from overlap.model.custom import apply, graph_is_kept
from overlap.model.graph_only import placeholder
from overlap.model.linear import LateWeight, autocast_like, graph_inputs, keep_weight
from overlap.model.swiglu import swiglu, swiglu_gradients

_FIRST_PASS = Limits(weights=96 * 2**20, rows=48 * 2**20)
"""What is taken at a time without a graph."""
_FORWARD = Limits(weights=24 * 2**20, rows=20 * 2**20)
"""The same with a graph: a replay is near a step's highest point."""


class Fp8GroupedProduct:
    """x weight^T per expert.

    Args:
        weight: [E, O, I]; tells experts and device.
        recipe: Transformer Engine's recipe.
        states: What te_scaling.make_state() gave for it.
        multiple: What the rows of an expert are padded to a multiple of.
    """

    def __init__(self, weight: Tensor, recipe: Any, states: nn.ModuleList, multiple: int) -> None:
        self._casts = make_casts(recipe, states, len(weight), weight.device)
        self._multiple = multiple

    def __call__(self, weight: Tensor, x: Tensor, splits: Sequence[int]) -> Tensor:
        """[N, I] -> [N, O], `splits` [E] rows per expert on the host; rows behind their sum give zeros."""
        return apply(_Grouped, x, *graph_inputs(x, weight), self._casts, Rows(tuple(splits), self._multiple))

    def activated(
        self, weight: Tensor, inner: Tensor, probs: Tensor, splits: Sequence[int], *, graph_only: bool = False
    ) -> Tensor:
        """The product of SwiGLU's result.

        Backward makes that result again, a few experts at a time, and writes `inner`'s gradient over `inner`, so that
        of both only `inner` is ever whole, unless the graph is kept for another backward: nothing else may need it.

        Args:
            weight: [E, C, W].
            inner: [N, 2*W], gate first.
            probs: [N], the weight of each row.
            splits: [E] rows per expert, on the host.
            graph_only: Leave the product out: the graph is the same, what is returned holds no numbers.

        Returns:
            [N, C]; zeros in the rows of no expert.
        """
        given = Rows(tuple(splits), self._multiple)
        return apply(_Activated, inner, *graph_inputs(inner, weight), probs, self._casts, given, graph_only)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        late: LateWeight | None,
        anchor: Tensor | None,
        casts: Casts,
        given: Rows,
    ) -> Tensor:
        x = autocast_like(x).contiguous()
        keeps = ctx.needs_input_grad[1] or late is not None
        out = to_fill(x, weight.shape[1], given.splits)
        kept: list[Any] = []
        for piece in busy_pieces(weight, given, _FORWARD if keeps else _FIRST_PASS):
            kept += _product_piece(x[piece.rows], weight, out, casts, piece, keeps)
        plain, ctx.restore = flat(kept)
        ctx.save_for_backward(weight, *plain)
        ctx.casts, ctx.given = casts, given
        keep_weight(ctx, weight, late)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, *plain = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = to_fill(grad, weight.shape[2], ctx.given.splits) if ctx.needs_input_grad[0] else None
        kept: Iterator[Any] = iter(ctx.restore(*plain))

        def take(piece: Piece, part: Tensor) -> None:
            if grad_x is not None:
                piece.unpad(part, grad_x)

        gradient = Backward(
            weight=weight, grad=grad, casts=ctx.casts, given=ctx.given,
            inputs=lambda piece: list(islice(kept, len(piece.busy))),
            take=None if grad_x is None else take,
        ).run(ctx)  # fmt: skip
        return grad_x, gradient, None, None, None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inner: Tensor,
        weight: Tensor,
        late: LateWeight | None,
        anchor: Tensor | None,
        probs: Tensor,
        casts: Casts,
        given: Rows,
        graph_only: bool,
    ) -> Tensor:
        ctx.save_for_backward(inner, weight, probs)
        ctx.casts, ctx.given = casts, given
        keep_weight(ctx, weight, late)
        if graph_only:
            return placeholder(inner, inner.shape[0], weight.shape[1])
        out = to_fill(inner, weight.shape[1], given.splits)
        for piece in busy_pieces(weight, given, _FORWARD):
            _product_piece(_weighted(inner, probs, piece), weight, out, casts, piece, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, Tensor | None, None, None, None]:
        inner, weight, probs = ctx.saved_tensors
        casts: Casts = ctx.casts
        grad_probs = probs.new_zeros(probs.shape)
        grad_inner = torch.empty_like(inner) if graph_is_kept() else inner.detach()

        def inputs(piece: Piece) -> list[Any]:
            weighted = piece.spread(_weighted(inner, probs, piece))
            return _cast(weighted, casts, piece, rows=False, columns=True)

        def take(piece: Piece, part: Tensor) -> None:
            rows = piece.rows
            _, of_probs = swiglu_gradients(inner[rows], probs[rows], piece.gather(part), grad_inner[rows])
            if of_probs is not None:
                grad_probs[rows] = of_probs

        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[4]
        gradient = Backward(
            weight=weight, grad=grad.contiguous(), casts=casts, given=ctx.given, inputs=inputs,
            take=take if wanted else None,
        ).run(ctx)  # fmt: skip
        if not wanted:
            return None, gradient, None, None, None, None, None, None
        # Be it of no rows, torch counts this write, as it does not our kernels': whoever has saved `inner` too is told.
        grad_inner[sum(ctx.given.splits) :] = 0
        return grad_inner, gradient, None, None, grad_probs, None, None, None


def _weighted(inner: Tensor, probs: Tensor, piece: Piece) -> Tensor:
    """SwiGLU of the piece's rows."""
    return autocast_like(swiglu(inner[piece.rows], probs[piece.rows]))


def _product_piece(rows: Tensor, weight: Tensor, out: Tensor, casts: Casts, piece: Piece, keeps: bool) -> list[Any]:
    """Fill the piece's rows; returns what is kept of its inputs.

    A function of its own: its locals are gone before the next piece is cast.
    """
    read = _cast(piece.spread(rows), casts, piece, rows=True, columns=keeps)
    made = cast_weights(weight, casts, piece.experts, piece.busy, columns=False)
    place = piece.place(out)
    whole = out.new_empty(sum(piece.padded), out.shape[1]) if place is None else place
    multiply_each(made, read, [whole], piece.padded, FORWARD, accurate=casts.accurate_forward)
    if place is None:
        piece.unpad(whole, out)
    if not keeps:
        return []
    keep_columns(read)
    return read


def _cast(padded: Tensor, casts: Casts, piece: Piece, *, rows: bool, columns: bool) -> list[Any]:
    theirs = [casts.inputs[piece.experts.start + place] for place in piece.busy]
    if not columns:
        return cast_rows(padded, piece.padded, theirs, casts)
    return cast_split(padded, piece.padded, theirs, rows=rows, columns=columns, from_rows=casts.from_rows)
