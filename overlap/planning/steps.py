"""RankSteps: what a rank's steps take, one after another; chunks that run alike share what is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap.memory.bins import Storage
from overlap.memory.ledger import Part
from overlap.pipeline_model.run import StepTime
from overlap.planning.actions import Move
from overlap.planning.bins import Bytes, add, rank_bins
from overlap.planning.loans import NO_LOANS, Loans, Passage, begin, oldest
from overlap.planning.pieces import Form, Kept, Pair, Pieces
from overlap.planning.walk import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A plan after others."""

    bytes: Bytes
    """At its highest point: of the microbatches of the plan, and what lanes hold of others' memory."""
    height: int
    """Their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Between:
    """Between two steps."""

    loans: Loans
    oldest: int


class RankSteps:
    """The steps of one choice.

    Args:
        pieces: What single plans take.
        forms: Of every chunk.
    """

    def __init__(self, pieces: Pieces, forms: Sequence[Form]) -> None:
        self._pieces = pieces
        self._forms = forms
        self._like: dict[int | None, int | None] = {stage: forms.index(form) for stage, form in enumerate(forms)}
        """The first chunk that runs as this one."""
        self._like[None] = None
        self._between = [_Between(loans=NO_LOANS, oldest=0)]
        """A step is looked up by the number here of what it begins with: comparing loans takes time."""
        self._numbers = {NO_LOANS: 0}
        self._found: dict[tuple[Move, int, int], tuple[Piece, int]] = {}
        self._times: dict[Move, StepTime] = {}
        kept = {place: pieces.kept(forms[place]) for place in self._like.values() if place is not None}
        self.kept: Sequence[Kept] = [kept[forms.index(form)] for form in forms]
        """What a microbatch of each chunk keeps."""

    def after(self, number: int, move: Move, distance: int) -> tuple[Piece, int]:
        """What a step takes, and the number of what lanes hold at its end.

        Args:
            number: Of what lanes hold before it; 0: nothing.
            move: The chunks that run.
            distance: How many steps ago the microbatch that runs backward ran forward; 0: none does.
        """
        alike, near = self._alike(move), min(distance, self._between[number].oldest + 1)
        if (alike, near, number) not in self._found:
            loans = self._between[number].loans
            beginning, places = begin(loans, near)
            walked = self._pieces.walked(self._pair(alike), beginning)
            passage = Passage(loans, near, places, walked.ending)
            self._found[alike, near, number] = _piece(walked.records, passage), self._number(passage.left())
        return self._found[alike, near, number]

    def time(self, move: Move) -> StepTime:
        """How long a step takes."""
        alike = self._alike(move)
        if alike not in self._times:
            self._times[alike] = self._pieces.time(self._pair(alike))
        return self._times[alike]

    def _alike(self, move: Move) -> Move:
        forward, backward = move
        return self._like[forward], self._like[backward]

    def _pair(self, move: Move) -> Pair:
        forward, backward = (None if stage is None else self._forms[stage] for stage in move)
        return forward, backward

    def _number(self, loans: Loans) -> int:
        if loans not in self._numbers:
            self._numbers[loans] = len(self._between)
            self._between.append(_Between(loans=loans, oldest=oldest(loans)))
        return self._numbers[loans]


def _piece(records: Sequence[Record], passage: Passage) -> Piece:
    best: tuple[int, Bytes, Sequence[Storage]] = (-1, {}, ())
    for record in records:
        lent = passage.there(record.place)
        height = record.height + sum(storage.nbytes for storage in lent)
        if height > best[0]:
            best = height, record.bytes, lent
    height, found, there = best
    parts: dict[Part, int] = {}
    for storage in there:
        part = storage.unclaimed, storage.stage
        parts[part] = parts.get(part, 0) + storage.nbytes
    return Piece(bytes=add(found, rank_bins(parts)), height=height)
