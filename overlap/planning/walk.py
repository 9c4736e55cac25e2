"""RankWalk: a walk that notes a rank's bins and each slot's time, for one plan of a pipeline rank at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap.memory.facts import Footprint
from overlap.memory.gap import Gap
from overlap.memory.predict import Walk, WalkedSlot
from overlap.planning.bins import Bytes, RankBin, rank_bins, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The highest point inside one slot."""

    slot: str
    bytes: Bytes
    milliseconds: float
    """What the slot computes."""
    traffic: float
    """Bytes that the slot reads and writes, or copies."""


class RankWalk(Walk):
    """Args as Walk's; `points` has one entry per slot."""

    def __init__(self, footprints: Sequence[Footprint], gaps: Sequence[Gap], *, delayed: bool) -> None:
        super().__init__(footprints, gaps, delayed=delayed, host=False)
        self.points: list[Point] = []

    def now(self) -> Bytes:
        """What is held between slots."""
        self._ledger.forget()
        return rank_bins(self._ledger.parts)

    def _end(self, name: str, slot: WalkedSlot, start: int) -> None:
        super()._end(name, slot, start)
        held = rank_bins(self._ledger.parts)
        inside = {**held, RankBin.TEMPORARIES: self.tops[-1].bytes - total(held)}
        work = slot.facts.work
        self.points.append(Point(slot=name, bytes=inside, milliseconds=work.milliseconds, traffic=work.traffic))
