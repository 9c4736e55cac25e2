"""Backward of a grouped product in 8 bits, a few experts at a time.

NOTE [ Large tensors of a piece ]
1. The output gradient of a piece is padded and cast once, for both products that read it.
2. Then the weight gradient is made and added, and let go; then weights are cast and the input gradient is made. So a
   piece's weight gradient and its weights in 8 bits are never there together.
3. Each step is a function of its own: its locals are gone before the next one allocates.
Legend: N rows sorted by expert, E experts, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    multiply_each,
)
from overlap.backends.te_pieces import Piece, Rows, busy_pieces, pieces
from overlap.backends.te_together import cast_weights
from overlap.model.linear import gradient_of_weight
from recompute.wgrad import puts_off

_BYTES = 48 * 2**20
"""Most bytes of weights of a piece: a weight gradient is as large."""

Inputs = Callable[[Piece], list[Any]]
"""The quantised inputs of a piece's experts, with columns."""
Take = Callable[[Piece, Tensor], None]
"""Takes a piece's input gradient, [sum of padded, I]. Called after the piece's inputs were asked for."""


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
            for piece in busy_pieces(self.weight, self.given, _BYTES):
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
        for piece in busy_pieces(self.weight, self.given, _BYTES):
            inputs += self.inputs(piece)
            read = self._cast(piece, columns=True)
            self._give(piece, read)
            keep_columns(read)
            gradients += read
        return [*inputs, *gradients]

    def _compute(self, *, dtype: torch.dtype) -> Tensor:
        """[E, O, I], zeros for experts without rows."""
        out = torch.empty(self.weight.shape, dtype=self.grad.dtype, device=self.weight.device)
        for piece in pieces(self.weight, self.given, _BYTES):
            self._give(piece, self._fill(out[piece.experts], piece))
        return out.to(dtype)

    def _add(self, into: Tensor) -> None:
        """Add it to [E, O, I]."""
        for piece in busy_pieces(self.weight, self.given, _BYTES):
            self._give(piece, self._add_piece(into[piece.experts], piece))

    def _add_piece(self, into: Tensor, piece: Piece) -> list[Any]:
        out = torch.empty(into.shape, dtype=self.grad.dtype, device=into.device)
        read = self._fill(out, piece)
        into += out.to(into.dtype)
        return read

    def _fill(self, out: Tensor, piece: Piece) -> list[Any]:
        """The piece's weight gradient; returns the cast output gradient."""
        if not piece.busy:
            fill([], [], out, piece)
            return []
        inputs = self.inputs(piece)
        read = self._cast(piece, columns=True)
        fill(inputs, read, out, piece)
        return read

    def _cast(self, piece: Piece, *, columns: bool) -> list[Any]:
        theirs = [self.casts.gradients[piece.experts.start + place] for place in piece.busy]
        rows, from_rows = self.take is not None, self.casts.from_rows
        return cast_split(
            piece.pad(self.grad), piece.padded, theirs, rows=rows, columns=columns, from_rows=from_rows
        )  # fmt: skip

    def _give(self, piece: Piece, read: list[Any]) -> None:
        """Make the piece's input gradient."""
        if self.take is None or not piece.busy:
            return
        self.take(piece, self._input_gradient(piece, read))

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
        for piece, inputs, gradients in self._pieces(plain):
            fill(inputs, gradients, out[piece.experts], piece)
        return out.to(dtype)

    def add(self, into: Tensor, *plain: Any) -> None:
        """Add it to [E, O, I] a piece at a time."""
        for piece, inputs, gradients in self._pieces(plain):
            if piece.busy:
                self._add_piece(into[piece.experts], piece, inputs, gradients)

    def _add_piece(self, into: Tensor, piece: Piece, inputs: list[Any], gradients: list[Any]) -> None:
        out = torch.empty(into.shape, dtype=self.dtype, device=into.device)
        fill(inputs, gradients, out, piece)
        into += out.to(into.dtype)

    def _pieces(self, plain: Sequence[Any]) -> list[tuple[Piece, list[Any], list[Any]]]:
        whole = self.restore(*plain)
        inputs, gradients = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        result, place = [], 0
        for piece in pieces(self.weight, self.given, _BYTES):
            part = slice(place, place + len(piece.busy))
            result.append((piece, inputs[part], gradients[part]))
            place = part.stop
        return result


def fill(inputs: Sequence[Any], gradients: Sequence[Any], out: Tensor, piece: Piece) -> None:
    """Weight gradients of the piece's experts, zeros for those without rows: [experts of the piece, O, I]."""
    if len(piece.busy) < len(out):
        out.zero_()
    if piece.busy:
        multiply_each(inputs, gradients, [out[place] for place in piece.busy], piece.padded, WEIGHT_GRADIENT)
