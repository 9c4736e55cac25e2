"""Experts a few at a time: which rows of a grouped product belong to them, and their padding.

Legend: N rows sorted by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


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
    cuts: tuple[int, ...]
    """Rows, padding, rows, padding, and so on."""

    @property
    def pads(self) -> bool:
        """Whether there is padding."""
        return self.splits != self.padded

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


def pieces(weight: Tensor, given: Rows, most_bytes: int) -> Sequence[Piece]:
    """Cut experts [E, ...] into pieces of at most `most_bytes` of weights, of one expert at least."""
    return _cut(given, max(most_bytes * len(weight) // max(weight.nbytes, 1), 1))


@lru_cache(maxsize=64)
def _cut(given: Rows, step: int) -> Sequence[Piece]:
    """Pieces of `step` experts. Both products, their replay and their backward ask for the same ones."""
    result, row = [], 0
    for first in range(0, len(given.splits), step):
        part = given.splits[first : first + step]
        end = row + sum(part)
        busy = tuple(place for place, rows in enumerate(part) if rows)
        counts = tuple(part[place] for place in busy)
        padded = tuple(-(-rows // given.multiple) * given.multiple for rows in counts)
        cuts = tuple(rows for one, whole in zip(counts, padded, strict=True) for rows in (one, whole - one))
        result.append(Piece(slice(first, first + len(part)), slice(row, end), busy, counts, padded, cuts))
        row = end
    return tuple(result)


def busy_pieces(weight: Tensor, given: Rows, most_bytes: int) -> list[Piece]:
    """Those that have rows."""
    return [piece for piece in pieces(weight, given, most_bytes) if piece.busy]


def to_fill(x: Tensor, width: int, splits: Sequence[int]) -> Tensor:
    """[N, width], to be filled; zeros in the rows of no expert."""
    result, total = x.new_empty(x.shape[0], width), sum(splits)
    if total < x.shape[0]:
        result[total:] = 0
    return result
