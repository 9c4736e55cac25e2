"""Refs: the names of storages as one slot sees them. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where a storage comes from, as one stage sees it."""

    OUTSIDE = "outside"
    """A parameter or a buffer: not counted."""
    READ = "read"
    """Tensor `part` of the `place`-th value among `Issue.reads`."""
    PINNED = "pinned"
    """Tensor `part` of the `place`-th value among `Issue.pinned`."""
    PIECE = "piece"
    """B: the gradient piece in the `place`-th place of the flattened `Issue.pieces`."""
    GIVEN = "given"
    """W: the gradient piece that the stage's B gave to the `place`-th read."""
    FORWARD = "forward"
    """The `place`-th storage born in the stage's forward."""
    BACKWARD = "backward"
    """The `place`-th storage born in its backward."""
    WGRAD = "wgrad"
    """The `place`-th storage born in its delayed weight gradient."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A storage as one stage sees it."""

    source: Source
    place: int = 0
    part: int = 0


Refs = tuple[Ref, ...]
"""One per tensor of a value, in the order of `tensors_of`; for a holder, the set of what it holds."""
OUTSIDE_REF = Ref(Source.OUTSIDE)
