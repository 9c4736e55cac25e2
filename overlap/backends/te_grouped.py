"""One product per expert over rows sorted by expert, in 8 bits, by Transformer Engine's kernels.

Experts are taken a few at a time: what is cast for them (weights, rows of the output gradient) is let go before the
next, and a weight gradient is added to `.grad` as soon as theirs is there. See te_linear for what is kept.
Rows of an expert are padded to a multiple there too, so that no padded copy of the whole exists.
Legend: N rows sorted by expert, E experts, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    cast_split,
    cast_weights,
    flat,
    keep_columns,
    make_casts,
    multiply_each,
)
from overlap.model.custom import apply
from overlap.model.linear import LateWeight, autocast_like, gradient_of_weight, graph_inputs, keep_weight

_Operands = Callable[[], tuple[list[Any], list[Any]]]
"""Inputs and output gradients of a piece, cast when they are asked for."""
_FIRST_PASS_BYTES = 128 * 2**20
"""Most bytes of weights that are taken at a time without a graph; their rows take half as many."""
_FORWARD_BYTES = 32 * 2**20
"""The same with a graph: a replay is near a step's highest point."""
_BACKWARD_BYTES = 48 * 2**20
"""The same in backward, where columns are made beside rows, and a weight gradient is as large as the weights."""


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


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of each expert, and what they are padded to a multiple of."""

    splits: tuple[int, ...]
    multiple: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Experts that are taken together."""

    experts: slice
    rows: slice
    """Of all of them."""
    busy: tuple[int, ...]
    """Those that have rows, counted from the piece's first."""
    splits: tuple[int, ...]
    """Rows of each of these."""
    padded: tuple[int, ...]
    """The same with padding."""

    @property
    def pads(self) -> bool:
        """Whether there is padding."""
        return self.splits != self.padded

    def pad(self, x: Tensor) -> Tensor:
        """The piece's rows of [N, ...], zeros after each expert's."""
        if not self.pads:
            return x[self.rows]
        result = x.new_zeros(sum(self.padded), *x.shape[1:])
        torch._foreach_copy_(self._places(result), list(x[self.rows].split_with_sizes(self.splits)))
        return result

    def unpad(self, x: Tensor, out: Tensor) -> None:
        """Copy padded rows to the piece's rows of [N, ...]."""
        torch._foreach_copy_(list(out[self.rows].split_with_sizes(self.splits)), self._places(x))

    def _places(self, x: Tensor) -> list[Tensor]:
        cuts = [part for rows, whole in zip(self.splits, self.padded, strict=True) for part in (rows, whole - rows)]
        return list(x.split_with_sizes(cuts)[::2])


def pieces(weight: Tensor, given: Rows, most_bytes: int) -> list[Piece]:
    """Cut experts [E, ...] into pieces of at most `most_bytes` of weights, of one expert at least."""
    step = max(most_bytes // max(weight[0].numel() * weight.element_size(), 1), 1)
    result, row = [], 0
    for first in range(0, len(given.splits), step):
        part = given.splits[first : first + step]
        end = row + sum(part)
        busy = tuple(place for place, rows in enumerate(part) if rows)
        counts = tuple(part[place] for place in busy)
        padded = tuple(-(-rows // given.multiple) * given.multiple for rows in counts)
        result.append(Piece(slice(first, first + len(part)), slice(row, end), busy, counts, padded))
        row = end
    return result


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
        out = _empty(x, weight.shape[1], given)
        kept: list[Any] = []
        for piece in _busy(weight, given, _FORWARD_BYTES if keeps else _FIRST_PASS_BYTES):
            kept += _forward_piece(x, weight, out, casts, piece, keeps)
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
        grad_x = _input_gradient(weight, grad, ctx.casts, ctx.given) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] and not ctx.late:
            return grad_x, None, None, None, None, None
        tensors: tuple[Any, ...]
        if ctx.late:
            casts, busy = ctx.casts, _busy(weight, ctx.given, _BACKWARD_BYTES)
            read = [one for piece in busy for one in _cast(grad, casts.gradients, piece, casts, columns=True)]
            tensors, restore = flat([*ctx.restore(*plain), *read])
        else:
            tensors, restore = (grad, *plain), ctx.restore
        job = _WeightGradient(
            casts=ctx.casts, given=ctx.given, weight=weight.detach(), dtype=grad.dtype, restore=restore,
            is_cast=ctx.late,
        )  # fmt: skip
        gradient = gradient_of_weight(ctx, job.compute, *tensors, add=job.add)
        return grad_x, gradient, None, None, None, None


def _forward_piece(x: Tensor, weight: Tensor, out: Tensor, casts: Casts, piece: Piece, keeps: bool) -> list[Any]:
    """Fill the piece's rows; returns what is kept of its inputs.

    A function of its own, as for the other pieces: its locals are gone before the next piece is cast.
    """
    read = _cast(x, casts.inputs, piece, casts, rows=True, columns=keeps)
    made = _weights(weight, casts, piece, columns=False)
    _multiply(made, read, out, piece, FORWARD, accurate=casts.accurate_forward)
    if not keeps:
        return []
    keep_columns(read)
    return read


def _empty(x: Tensor, width: int, given: Rows) -> Tensor:
    """[N, width], to be filled; zeros in the rows of no expert."""
    result, total = x.new_empty(x.shape[0], width), sum(given.splits)
    if total < x.shape[0]:
        result[total:] = 0
    return result


def _multiply(firsts: list[Any], seconds: list[Any], out: Tensor, piece: Piece, layout: str, *, accurate: bool) -> None:
    """Fill the piece's rows of `out`."""
    whole = out.new_empty(sum(piece.padded), out.shape[1]) if piece.pads else out[piece.rows]
    multiply_each(firsts, seconds, [whole], piece.padded, layout, accurate=accurate)
    if piece.pads:
        piece.unpad(whole, out)


def _busy(weight: Tensor, given: Rows, most_bytes: int) -> list[Piece]:
    return [piece for piece in pieces(weight, given, most_bytes) if piece.busy]


def _weights(weight: Tensor, casts: Casts, piece: Piece, *, columns: bool) -> list[Any]:
    made = cast_weights(weight[piece.experts], casts.weights[piece.experts], columns=columns)
    return [made[place] for place in piece.busy]


def _cast(
    x: Tensor, quantizers: tuple[Any, ...], piece: Piece, casts: Casts, *, rows: bool = False, columns: bool = False
) -> list[Any]:
    theirs = [quantizers[piece.experts.start + place] for place in piece.busy]
    return cast_split(piece.pad(x), piece.padded, theirs, rows=rows, columns=columns, from_rows=casts.from_rows)


def _input_gradient(weight: Tensor, grad: Tensor, casts: Casts, given: Rows) -> Tensor:
    """[N, O] -> [N, I]."""
    result = _empty(grad, weight.shape[2], given)
    for piece in _busy(weight, given, _BACKWARD_BYTES):
        _input_gradient_piece(weight, grad, result, casts, piece)
    return result


def _input_gradient_piece(weight: Tensor, grad: Tensor, out: Tensor, casts: Casts, piece: Piece) -> None:
    read = _cast(grad, casts.gradients, piece, casts, rows=True)
    made = _weights(weight, casts, piece, columns=True)
    _multiply(made, read, out, piece, INPUT_GRADIENT, accurate=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightGradient:
    """The weight gradient of a call, now or later.

    Its tensors are the quantised inputs and gradients (`is_cast`), or the gradient as it is and the quantised inputs:
    what waits for its slot takes half as much in 8 bits, what is computed at once is cast a piece at a time.
    """

    casts: Casts
    given: Rows
    weight: Tensor
    dtype: torch.dtype
    restore: Callable[..., list[Any]]
    is_cast: bool

    def compute(self, *plain: Any, dtype: torch.dtype) -> Tensor:
        """[E, O, I], zeros for experts without rows."""
        out = torch.empty(self.weight.shape, dtype=self.dtype, device=self.weight.device)
        for piece, operands in self._operands(plain):
            self._fill(out[piece.experts], piece, *operands())
        return out.to(dtype)

    def add(self, into: Tensor, *plain: Any) -> None:
        """Add it to [E, O, I] a piece at a time."""
        for piece, operands in self._operands(plain):
            self._add_piece(into[piece.experts], piece, operands)

    def _add_piece(self, into: Tensor, piece: Piece, operands: _Operands) -> None:
        out = torch.empty(into.shape, dtype=self.dtype, device=into.device)
        self._fill(out, piece, *operands())
        into += out.to(into.dtype)

    def _operands(self, plain: Sequence[Any]) -> Iterator[tuple[Piece, _Operands]]:
        whole = self.restore(*plain) if self.is_cast else self.restore(*plain[1:])
        place, gradients = 0, len(whole) // 2
        for piece in pieces(self.weight, self.given, _BACKWARD_BYTES):
            count = len(piece.busy)
            xs = whole[place : place + count]
            waiting = whole[gradients + place : gradients + place + count] if self.is_cast else []
            yield piece, partial(self._operands_of, piece, plain[0] if plain else None, xs, waiting)
            place += count

    def _operands_of(self, piece: Piece, grad: Any, xs: list[Any], waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        if self.is_cast or not piece.busy:
            return xs, waiting
        return xs, _cast(grad, self.casts.gradients, piece, self.casts, columns=True)

    def _fill(self, out: Tensor, piece: Piece, xs: list[Any], grads: list[Any]) -> None:
        if len(piece.busy) < len(out):
            out.zero_()
        if piece.busy:
            multiply_each(xs, grads, [out[place] for place in piece.busy], piece.padded, WEIGHT_GRADIENT)
