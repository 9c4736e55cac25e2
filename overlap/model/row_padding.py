"""Pad the rows of each expert to a multiple, as low-precision grouped products want them, and take the padding out.

Both directions keep nothing but an index; each is the other's backward.
Legend: N rows sorted by expert, E experts, P rows with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.model.custom import apply


@dataclass(frozen=True, slots=True)
class RowPadding:
    """Where the rows of each expert go."""

    target: Tensor
    """[M] int64, M <= N: the place of each row that belongs to an expert."""
    rows: int
    """N; rows behind the first M belong to no expert."""
    splits: tuple[int, ...]
    """[E] rows per expert, padding included; they sum to P."""

    def pad(self, x: Tensor) -> Tensor:
        """[N, ...] -> [P, ...], zeros in between."""
        return apply(_Pad, x, self) if self._moves else x

    def unpad(self, x: Tensor) -> Tensor:
        """[P, ...] -> [N, ...], zeros in the rows of no expert."""
        return apply(_Unpad, x, self) if self._moves else x

    @property
    def _moves(self) -> bool:
        return sum(self.splits) != self.rows or len(self.target) != self.rows


def make_padding(counts: Tensor, splits: Sequence[int], rows: int, multiple: int) -> RowPadding:
    """Plan the padding; waits for no device.

    Args:
        counts: [E] int64, rows per expert.
        splits: The same on the host.
        rows: N, at least their sum.
        multiple: Of the padded counts; 1: only rows of no expert are taken out.
    """
    padded = tuple(-(-split // multiple) * multiple for split in splits)
    total = sum(splits)
    target = torch.arange(total, device=counts.device)
    if sum(padded) != total:
        wide = (counts + multiple - 1).div(multiple, rounding_mode="floor") * multiple
        shift = (wide.cumsum(0) - wide) - (counts.cumsum(0) - counts)
        target = target + torch.repeat_interleave(shift, counts, output_size=total)
    return RowPadding(target, rows, padded)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: RowPadding) -> Tensor:
        ctx.padding = padding
        return _scatter(x, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.padding), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: RowPadding) -> Tensor:
        ctx.padding = padding
        return _gather(x, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.padding), None


def _scatter(x: Tensor, padding: RowPadding) -> Tensor:
    out = x.new_zeros(sum(padding.splits), *x.shape[1:])
    return out.index_copy_(0, padding.target, x[: len(padding.target)])


def _gather(x: Tensor, padding: RowPadding) -> Tensor:
    if len(padding.target) == padding.rows:
        return x.index_select(0, padding.target)
    out = x.new_zeros(padding.rows, *x.shape[1:])
    out[: len(padding.target)] = x.index_select(0, padding.target)
    return out
