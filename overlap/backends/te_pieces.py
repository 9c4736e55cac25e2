"""Experts a few at a time: which rows of a grouped product belong to them, and their padding.

Legend: N rows sorted by expert, E experts, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes; what a product's kernel may be chosen by. Padded rows of several experts keep to it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of each expert, and what they are padded to a multiple of."""

    splits: tuple[int, ...]
    multiple: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is taken at a time; one expert at least."""

    weights: int
    """Most bytes of weights, as they are."""
    rows: int | None = None
    """Most bytes of padded rows, in and out, in the weights' type; None: any. Routing may send most rows to a few."""


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
    cuts: tuple[int, ...]
    """Rows, padding, rows, padding, and so on."""
    behind: int
    """Rows of later pieces."""

    @property
    def pads(self) -> bool:
        """Whether there is padding."""
        return self.splits != self.padded

    def place(self, out: Tensor) -> Tensor | None:
        """Where in [N, ...] a product may write padded rows as they are; None: nowhere.

        One expert's padding falls on rows of later pieces, which must be written after it. Nowhere too where memory of
        its own would be aligned better: kernels are chosen by that, and a replay, cut otherwise, must get the same.
        """
        fits = not self.pads or (len(self.busy) == 1 and self.padded[0] - self.splits[0] <= self.behind)
        place = out[self.rows.start : self.rows.start + sum(self.padded)]
        aligned = place.storage_offset() * place.element_size() % _ALIGNMENT == 0
        return place if fits and aligned else None

    def pad(self, x: Tensor) -> Tensor:
        """The piece's rows of [N, ...], zeros after each expert's."""
        return self.spread(x[self.rows])

    def spread(self, part: Tensor) -> Tensor:
        """The piece's rows [sum of splits, ...] with zeros after each expert's."""
        if not self.pads:
            return part
        result = part.new_zeros(sum(self.padded), *part.shape[1:])
        torch._foreach_copy_(self._places(result), list(part.split_with_sizes(self.splits)))
        return result

    def unpad(self, x: Tensor, out: Tensor) -> None:
        """Copy padded rows to the piece's rows of [N, ...]."""
        torch._foreach_copy_(list(out[self.rows].split_with_sizes(self.splits)), self._places(x))

    def gather(self, x: Tensor) -> Tensor:
        """Padded rows without padding."""
        return torch.cat(self._places(x)) if self.pads else x

    def _places(self, x: Tensor) -> list[Tensor]:
        return list(x.split_with_sizes(self.cuts)[::2])


def pieces(weight: Tensor, given: Rows, limits: Limits) -> Sequence[Piece]:
    """Cut experts with matrices like [E, O, I] into pieces.

    Args:
        weight: Tells how large a matrix is.
        given: The experts' rows.
        limits: Of a piece.
    """
    matrix = max(weight.nbytes // len(weight), 1)
    row = sum(weight.shape[1:]) * weight.element_size()
    return _cut(given, limits.weights // matrix, None if limits.rows is None else limits.rows // row)


@lru_cache(maxsize=64)
def _cut(given: Rows, most_experts: int, most_rows: int | None) -> Sequence[Piece]:
    """Both products, their replay and their backward ask for the same pieces."""
    result: list[Piece] = []
    first = held = 0
    for place, rows in enumerate(_padded(given.splits, given.multiple)):
        many = most_rows is not None and held > 0 and rows > 0 and held + rows > most_rows
        if many or (place > first and place - first >= most_experts):
            result.append(_piece(given, slice(first, place), result))
            first, held = place, 0
        held += rows
    if first < len(given.splits):
        result.append(_piece(given, slice(first, len(given.splits)), result))
    return tuple(result)


def _padded(splits: Sequence[int], multiple: int) -> list[int]:
    return [-(-rows // multiple) * multiple for rows in splits]


def _piece(given: Rows, experts: slice, before: Sequence[Piece]) -> Piece:
    theirs, start = given.splits[experts], before[-1].rows.stop if before else 0
    busy = tuple(place for place, rows in enumerate(theirs) if rows)
    counts = tuple(theirs[place] for place in busy)
    padded = tuple(rows for rows in _padded(theirs, given.multiple) if rows)
    cuts = tuple(rows for one, whole in zip(counts, padded, strict=True) for rows in (one, whole - one))
    behind = sum(given.splits[experts.stop :])
    return Piece(experts, slice(start, start + sum(counts)), busy, counts, padded, cuts, behind)


def busy_pieces(weight: Tensor, given: Rows, limits: Limits) -> list[Piece]:
    """Those that have rows."""
    return [piece for piece in pieces(weight, given, limits) if piece.busy]


def to_fill(x: Tensor, width: int, splits: Sequence[int]) -> Tensor:
    """[N, width], to be filled; zeros in the rows of no expert."""
    result, total = x.new_empty(x.shape[0], width), sum(splits)
    if total < x.shape[0]:
        result[total:] = 0
    return result
