"""RankWalk: a walk that notes, plan by plan, a rank's bins at the highest point and each slot's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap.lower import Plan
from overlap.memory.facts import Footprint, Work
from overlap.memory.gap import Gap
from overlap.memory.predict import Walk, WalkedSlot
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from overlap.planning.bins import Bytes, RankBin, rank_bins


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """One plan."""

    bytes: Bytes
    """At its highest point."""
    work: Sequence[Work]
    """Of each issue."""


class RankWalk(Walk):
    """Args as Walk's; host memory does not count, and lanes are streams."""

    def __init__(self, footprints: Sequence[Footprint], gaps: Sequence[Gap], *, delayed: bool, ranks: int = 1) -> None:
        super().__init__(footprints, gaps, delayed=delayed, ranks=ranks, host=False, streams=True)
        self._height = -1
        self._highest: Bytes = {}
        self._work: list[Work] = []

    def now(self) -> Bytes:
        """What is held between slots."""
        self._forget()
        return rank_bins(self._ledger.parts)

    def walk(self, plan: Plan, forward: int | None, backward: int | None) -> Walked:
        """Walk a plan whose sides are these microbatches."""
        self._height, self._work = -1, []
        sides = {FORWARD_SIDE: forward, BACKWARD_SIDE: backward}
        self.run([(plan, {side: number for side, number in sides.items() if number is not None})])
        return Walked(bytes=self._highest, work=tuple(self._work))

    def _note(self, name: str, slot: WalkedSlot, top: int) -> None:
        self._work.append(slot.facts.work)
        if top > self._height:
            held = rank_bins(self._ledger.parts)
            self._height, self._highest = top, {**held, RankBin.TEMPORARIES: top - self._ledger.total}
