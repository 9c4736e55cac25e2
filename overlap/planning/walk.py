"""RankWalk: a walk that notes, plan by plan, a rank's highest points, each slot's work and what lanes hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlap.ir import Lane, Op
from overlap.lower import Plan
from overlap.memory.bins import Storage
from overlap.memory.crossing import CrossLanes, Use
from overlap.memory.facts import Footprint, Work
from overlap.memory.gap import Gap
from overlap.memory.held import Place
from overlap.memory.predict import Walk, WalkedSlot
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from overlap.planning.bins import Bytes, RankBin, rank_bins
from overlap.planning.loans import BEHIND, NOTHING, Beginning, Ending, Fresh, Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A point that is higher than all before it."""

    place: int
    """Of the issue."""
    height: int
    """Bytes of all kinds."""
    bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """One plan."""

    records: Sequence[Record]
    """In order. What plans before left on loan only gets less, so with that the highest point is one of these, too."""
    work: Sequence[Work]
    """Of each issue."""
    ending: Ending


class RankWalk(Walk):
    """Args as Walk's; host memory does not count, and lanes are streams."""

    def __init__(self, footprints: Sequence[Footprint], gaps: Sequence[Gap], *, delayed: bool, ranks: int = 1) -> None:
        super().__init__(footprints, gaps, delayed=delayed, ranks=ranks, host=False)
        self._lanes = self._crossing = CrossLanes()
        self._starts: Sequence[Use] = ()
        """The loans that the plan began with."""
        self._keys: Sequence[int] = ()
        """The storages that it began with."""
        self._records: list[Record] = []
        self._work: list[Work] = []

    def now(self) -> Bytes:
        """What microbatches hold between plans; lanes hold nothing more."""
        self._crossing.finish()
        self._forget()
        return rank_bins(self._ledger.parts)

    def walk(self, plan: Plan, forward: int | None, backward: int | None, beginning: Beginning = NOTHING) -> Walked:
        """Walk a plan whose sides are these microbatches.

        Args:
            plan: The plan.
            forward: Number of the microbatch that runs forward.
            backward: Number of the one that runs backward; it ran forward in this walk, in a plan of its own.
            beginning: What lanes hold before.
        """
        self._begin(beginning, backward)
        start = self._crossing.issued
        self._records, self._work = [], []
        sides = {FORWARD_SIDE: forward, BACKWARD_SIDE: backward}
        self.run([(plan, {side: number for side, number in sides.items() if number is not None})])
        return Walked(records=tuple(self._records), work=tuple(self._work), ending=self._ending(plan, forward, start))

    def _begin(self, beginning: Beginning, backward: int | None) -> None:
        """Let lanes hold this and nothing else.

        A wait for the first pass of `backward` lets go of all that was lent before, and of nothing that was lent after.
        """
        places = {} if backward is None else self._held[backward].places()
        mine: dict[Name, int] = {place: key for key, place in places.items()}
        behind = {lane: number + 1 for lane, number in self._crossing.issued.items()}
        self._keys = [mine[name] for name in beginning.storages]
        self._starts = [
            Use(
                loan.home,
                loan.user,
                behind[loan.user] if loan.when == BEHIND else loan.when,
                tuple(self._keys[place] for place in loan.lent),
            )
            for loan in beginning.loans
        ]
        self._crossing.restart(self._starts)

    def _ending(self, plan: Plan, forward: int | None, start: Mapping[Lane, int]) -> Ending:
        """What lanes hold at the end of a plan that began with so many issues of each lane."""
        places = {} if forward is None else self._held[forward].places()
        ahead: dict[Lane, list[bool]] = {lane: [] for lane in Lane}
        for issue in plan.issues:
            ahead[issue.lane].append(issue.slot.microbatch == FORWARD_SIDE)
        made: dict[tuple[Lane, Lane, int], dict[int, None]] = {}
        for use in self._crossing.uses():
            if use not in self._starts:
                before = 1 + sum(ahead[use.user][: use.number - start[use.user] - 1]) if forward is not None else 0
                made.setdefault((use.home, use.user, before), {}).update(dict.fromkeys(use.ids))
        first = sum(start.values()) + 1
        loose = frozenset(place for place, key in enumerate(self._keys) if self._ledger.loose(key))
        names = {self._keys[place]: place for place in loose}
        fresh = tuple(Fresh(*loan, self._fresh(keys, places, names, made)) for loan, keys in made.items())
        return Ending(
            behind=start,
            released=[(count - first, home, user, last) for count, home, user, last in self._crossing.released],
            loose=loose,
            fresh=tuple(loan for loan in fresh if loan.lent),
        )

    def _fresh(
        self,
        keys: Iterable[int],
        places: Mapping[int, Place],
        names: Mapping[int, int],
        made: Mapping[tuple[Lane, Lane, int], Mapping[int, None]],
    ) -> tuple[int | tuple[Name, Storage, bool], ...]:
        """The storages of a loan that this plan made."""
        known: list[int] = []
        kept: list[tuple[Name, Storage, bool]] = []
        sums: dict[tuple[tuple[int, ...], Op, str], int] = {}
        order = list(made)
        for key in keys:
            storage = self._ledger.storage(key)
            if key in names:
                known.append(names[key])
            elif storage is not None and key in places:
                kept.append((places[key], storage, True))
            elif storage is not None and self._ledger.loose(key):
                # Let go with the last of the loans that it is part of: those that are part of the same ones are one.
                users = tuple(place for place, loan in enumerate(order) if key in made[loan])
                kind = users, storage.born, storage.stage
                sums[kind] = sums.get(kind, 0) + storage.nbytes
        loose = ((kind, Storage(nbytes, kind[1], kind[2]), False) for kind, nbytes in sums.items())
        return (*known, *kept, *loose)

    def _note(self, name: str, slot: WalkedSlot, top: int) -> None:
        self._work.append(slot.facts.work)
        if not self._records or top > self._records[-1].height:
            held = {**rank_bins(self._ledger.parts), RankBin.TEMPORARIES: top - self._ledger.total}
            self._records.append(Record(place=len(self._work) - 1, height=top, bytes=held))
