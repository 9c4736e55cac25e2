"""Backward of a grouped product in 8 bits, a few experts at a time.

NOTE [ Large tensors of a piece ]
1. The output gradient of a piece is padded and cast once, for both products that read it.
2. Then the weight gradient is made and added, and let go; the output gradient's columns and the inputs, which only it
   reads, go too. Then weights are cast and the input gradient is made. So a piece's weight gradient and its weights in
   8 bits are never there together.
3. The output gradient goes before the input gradient is taken.
4. Each step is a function of its own: its locals are gone before the next one allocates.
A piece ends where its weights or its rows are too many, for routing may send most rows to a few experts.
Legend: N rows sorted by expert, E experts, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap.backends.te_casts import (
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Casts,
    cast_split,
    flat,
    keep_columns,
    keep_rows,
    multiply_each,
)
from overlap.backends.te_pieces import Limits, Piece, Rows, busy_pieces, pieces
from overlap.backends.te_together import cast_weights
from overlap.model.linear import gradient_of_weight
from recompute.wgrad import puts_off

_PIECE = Limits(weights=48 * 2**20, rows=32 * 2**20)
"""Experts that are taken together; a weight gradient is as large as the weight."""

Inputs = Callable[[Piece], list[Any]]
"""The quantised inputs of a piece's experts, with columns."""
Take = Callable[[Piece, Tensor], None]
"""Takes a piece's input gradient, [sum of padded, I]. Called after the piece's inputs were asked for."""
Write = Callable[[Tensor, Sequence[Any], Sequence[Any], Piece], None]
"""Fills a piece's part of a weight gradient, or adds to it; see fill()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """One backward of one product.

    Args:
        weight: [E, O, I].
        grad: [N, O], of the product's output.
        casts: Quantizers.
        given: Rows.
        inputs: Gives the inputs; asked once per piece, in order.
        take: Takes input gradients; None: nobody wants them.
    """

    weight: Tensor
    grad: Tensor
    casts: Casts
    given: Rows
    inputs: Inputs
    take: Take | None

    def run(self, ctx: Any) -> Tensor | None:
        """Make input gradients, and the gradient of the weight, which is `ctx.needs_input_grad[1]`'s: now, or put off.

        Args:
            ctx: Of the Function, with `weight` and `late` as linear.keep_weight() set them.

        Returns:
            The weight's gradient; None: there is none, it was added in place, or it is put off.
        """
        if not ctx.needs_input_grad[1] and not ctx.late:
            for piece in busy_pieces(self.weight, self.given, _PIECE):
                self._give(piece, self._cast(piece, columns=False))
            return None
        if ctx.late or puts_off(ctx.weight):
            tensors, restore = flat(self._cast_all())
            late = _Late(self.weight.detach(), self.given, self.grad.dtype, restore)
            return gradient_of_weight(ctx, late.compute, *tensors, add=late.add)
        return gradient_of_weight(ctx, self._compute, add=self._add)

    def _cast_all(self) -> list[Any]:
        """Inputs, then output gradients, of all that have rows."""
        inputs: list[Any] = []
        gradients: list[Any] = []
        for piece in busy_pieces(self.weight, self.given, _PIECE):
            inputs += self.inputs(piece)
            read = self._cast(piece, columns=True)
            self._give(piece, list(read))
            keep_columns(read)
            gradients += read
        return [*inputs, *gradients]

    def _compute(self, *, dtype: torch.dtype) -> Tensor:
        """[E, O, I], zeros for experts without rows."""
        out = torch.empty(self.weight.shape, dtype=self.grad.dtype, device=self.weight.device)
        for piece in pieces(self.weight, self.given, _PIECE):
            self._give(piece, self._weight_gradient(piece, out, fill))
        return out.to(dtype)

    def _add(self, into: Tensor) -> None:
        """Add it to [E, O, I]."""
        for piece in busy_pieces(self.weight, self.given, _PIECE):
            self._give(piece, self._weight_gradient(piece, into, partial(add, self.grad.dtype)))

    def _weight_gradient(self, piece: Piece, target: Tensor, write: Write) -> list[Any]:
        """Write the piece's part of [E, O, I]; returns the cast output gradient as the input gradient reads it."""
        if not piece.busy:
            write(target[piece.experts], [], [], piece)
            return []
        inputs = self.inputs(piece)
        read = self._cast(piece, columns=True)
        write(target[piece.experts], inputs, read, piece)
        if self.take is not None:
            keep_rows(read)
        return read

    def _cast(self, piece: Piece, *, columns: bool) -> list[Any]:
        theirs = [self.casts.gradients[piece.experts.start + place] for place in piece.busy]
        rows, from_rows = self.take is not None, self.casts.from_rows
        return cast_split(
            piece.pad(self.grad), piece.padded, theirs, rows=rows, columns=columns, from_rows=from_rows
        )  # fmt: skip

    def _give(self, piece: Piece, read: list[Any]) -> None:
        """Make the piece's input gradient; empties the list before it is taken."""
        if self.take is None or not piece.busy:
            return
        made = self._input_gradient(piece, read)
        read.clear()
        self.take(piece, made)

    def _input_gradient(self, piece: Piece, read: list[Any]) -> Tensor:
        made = cast_weights(self.weight, self.casts, piece.experts, piece.busy, columns=True)
        result = self.grad.new_empty(sum(piece.padded), self.weight.shape[2])
        multiply_each(made, read, [result], piece.padded, INPUT_GRADIENT)
        return result


@dataclass(frozen=True, slots=True)
class _Late:
    """A weight gradient that waits for its slot, with quantised inputs and output gradients: half of what they were."""

    weight: Tensor
    given: Rows
    dtype: torch.dtype
    restore: Callable[..., list[Any]]

    def compute(self, *plain: Any, dtype: torch.dtype) -> Tensor:
        """[E, O, I], zeros for experts without rows."""
        out = torch.empty(self.weight.shape, dtype=self.dtype, device=self.weight.device)
        self._write(plain, out, fill)
        return out.to(dtype)

    def add(self, into: Tensor, *plain: Any) -> None:
        """Add it to [E, O, I] a piece at a time, where there are rows."""
        self._write(plain, into, partial(add, self.dtype))

    def _write(self, plain: Sequence[Any], target: Tensor, write: Write) -> None:
        whole, place = self.restore(*plain), 0
        inputs, gradients = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        for piece in pieces(self.weight, self.given, _PIECE):
            theirs = slice(place, place + len(piece.busy))
            write(target[piece.experts], inputs[theirs], gradients[theirs], piece)
            place = theirs.stop


def fill(out: Tensor, inputs: Sequence[Any], gradients: Sequence[Any], piece: Piece) -> None:
    """Weight gradients of a piece's experts, zeros for those without rows.

    Args:
        out: [experts, O, I].
        inputs: Quantised, with columns, of those that have rows.
        gradients: The same of the output gradient.
        piece: The experts.
    """
    if len(piece.busy) < len(out):
        out.zero_()
    if piece.busy:
        multiply_each(inputs, gradients, [out[place] for place in piece.busy], piece.padded, WEIGHT_GRADIENT)


def add(dtype: torch.dtype, into: Tensor, inputs: Sequence[Any], gradients: Sequence[Any], piece: Piece) -> None:
    """Add what fill() makes, in `dtype`; nothing where there are no rows."""
    if piece.busy:
        out = torch.empty(into.shape, dtype=dtype, device=into.device)
        fill(out, inputs, gradients, piece)
        into += out.to(into.dtype)
