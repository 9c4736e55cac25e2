"""CrossLanes: what stream lanes hold of each other's memory, in storage ids; the counterpart of streams.StreamLanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from overlap.ir import SETTLING, Lane
from overlap.lower import Event, Issue
from overlap.memory.held import Held
from overlap.memory.refs import Source


class Crossing(Protocol):
    """What lanes hold beside the microbatches."""

    def begin(self, issue: Issue, number: int, held: Held) -> None:
        """An issue of the `number`-th microbatch, which holds `held`, is about to run."""

    def end(self, issue: Issue, number: int) -> None:
        """It has run."""

    def settle(self) -> None:
        """A plan is over."""

    def finish(self) -> None:
        """The step is over."""

    def ids(self) -> Iterable[Iterable[int]]:
        """The storages held."""


class OneLane:
    """Nothing crosses: NullLanes' counterpart."""

    def begin(self, issue: Issue, number: int, held: Held) -> None:
        """Nothing to hold."""

    def end(self, issue: Issue, number: int) -> None:
        """Nothing to mark."""

    def settle(self) -> None:
        """Nothing to let go."""

    def finish(self) -> None:
        """Nothing to let go."""

    def ids(self) -> Iterable[Iterable[int]]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True)
class _Use:
    number: int
    """Of the issue within its lane."""
    ids: tuple[int, ...]


class CrossLanes:
    """Memory that crosses lanes is held as NOTE [ Memory that crosses lanes ] in streams.py says."""

    def __init__(self) -> None:
        self._issued = dict.fromkeys(Lane, 0)
        self._marks: dict[tuple[int, Event], tuple[Lane, int]] = {}
        self._uses: dict[tuple[Lane, Lane], deque[_Use]] = {}
        """Per (owner, user) lanes, oldest first."""

    def begin(self, issue: Issue, number: int, held: Held) -> None:
        """Let go of what the issue waits for, and hold what it uses of other lanes' memory."""
        lane = issue.lane
        self._issued[lane] += 1
        for event in issue.waits:
            self._release(lane, *self._marks[number, event])
        for home, ids in _uses(issue, held):
            self._uses.setdefault((home, lane), deque()).append(_Use(self._issued[lane], tuple(ids)))

    def end(self, issue: Issue, number: int) -> None:
        """Mark the end of an issue that another lane waits for."""
        if issue.signals:
            self._marks[number, (issue.slot.op, issue.stage.key)] = issue.lane, self._issued[issue.lane]

    def settle(self) -> None:
        """SETTLING have waited for compute."""
        for lane in SETTLING:
            self._uses.pop((lane, Lane.COMPUTE), None)

    def finish(self) -> None:
        """Let go of everything."""
        self._uses.clear()

    def ids(self) -> Iterable[Iterable[int]]:
        """What is held."""
        return (use.ids for uses in self._uses.values() for use in uses)

    def _release(self, home: Lane, user: Lane, number: int) -> None:
        uses = self._uses.get((home, user))
        while uses and uses[0].number <= number:
            uses.popleft()


def _uses(issue: Issue, held: Held) -> Iterator[tuple[Lane, Iterable[int]]]:
    """The owner lanes of what an issue uses, and the storages."""
    for key, home in zip(issue.foreign, issue.foreign_owners, strict=True):
        yield home, held.values[key]
    for piece, home in zip(issue.foreign_pieces, issue.piece_owners, strict=True):
        yield home, held.grads.get(piece, ())
    for place, home in issue.foreign_leaves:
        _, names = held.graphs[issue.stage.key]
        yield home, [key for ref, key in names.items() if (ref.source, ref.place) == (Source.READ, place)]
    for home in issue.pending_owners:
        # All of it: a tensor that waits keeps its graph's nodes, and these the leaves.
        _, waiting, _ = held.pending[issue.stage.key]
        yield home, waiting.values()
