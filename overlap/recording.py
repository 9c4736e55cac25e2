"""RecordingLanes: lanes on a CPU that run nothing and record what happens before what.

Every lane has a vector clock: for each lane, the last issue of it that this one is ordered behind. Events carry
clocks. A use that nothing orders behind its write, a use after release, and a release that another lane's use may
outlive are races on a GPU; here they raise RaceError. What the host thread decides (issue order, frees) is recorded
as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from overlap.errors import RaceError
from overlap.ir import Lane, Op, Slot
from overlap.lanes import Owner
from overlap.lower import Event, Issue, Key
from overlap.pieces import Piece

Clock = Mapping[Lane, int]
"""Per lane, the number of its last issue that is ordered before; absent: none is."""

_Name = tuple[int, str, Key | Piece]
"""A buffer: microbatch, `value` or `piece`, key."""


@dataclass(slots=True)
class _Buffer:
    """What is known of a value or gradient piece."""

    lane: Lane | None
    """Lane that wrote it; None: it was fed, before the step began."""
    home: Lane
    """Lane that allocated it: another than wrote it, if that passed on what it was given."""
    written: int = 0
    """Number of the issue of that lane that wrote it last."""
    uses: dict[Lane, tuple[int, Slot]] = field(default_factory=dict)
    """Last use on each other lane that the allocator was not told of: those it was told of it waits for (R14)."""
    released: Slot | None = None


class RecordingLanes:
    """Checks instead of running; see the module's text for what.

    A buffer is released where its issue ends: the engine drops it there, and a freed buffer goes back to the lane
    that allocated it. Pieces are released by the backward that adds them up.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        """`lane what`, one line for each launch, wait, use, write and release, in the host's order."""
        self._clocks: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}
        self._buffers: dict[_Name, _Buffer] = {}

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Wait, and check every use.

        Raises:
            RaceError: A use races with its write or comes after release, or an awaited event was never recorded.
        """
        lane, clock = issue.lane, self._clocks[issue.lane]
        self._note(lane, "launch", issue.slot)
        for event in issue.waits:
            if event not in owner.events:
                raise RaceError(issue.slot, _event(event), "is waited for, but its slot recorded no event")
            self._note(lane, "wait", _event(event))
            for other, number in owner.events[event].items():
                clock[other] = max(clock.get(other, 0), number)
        clock[lane] = clock.get(lane, 0) + 1
        for name, announced in self._uses(issue, owner):
            self._use(issue, name, announced)

    def end(self, issue: Issue, owner: Owner) -> Clock:
        """Record what the issue wrote and what goes with it.

        Returns:
            The lane's clock, as the event.

        Raises:
            RaceError: A released buffer may still be in use on another lane, or is written again.
        """
        lane = issue.lane
        number = self._clocks[lane][lane]
        for name in self._writes(issue, owner):
            self._note(lane, "write", _text(name))
            known = self._buffers.get(name)
            if known is not None and known.released is not None:
                raise RaceError(issue.slot, _text(name), f"is written after {known.released} released it")
            self._buffers[name] = _Buffer(lane, _home(issue, name), number)
        for name in self._releases(issue, owner):
            self._release(issue, name)
        return dict(self._clocks[lane])

    def enter(self, lane: Lane) -> None:
        """What runs outside issues is not checked."""

    def settle(self) -> None:
        """It only adds waits, which plans do not count on."""

    def finish(self) -> None:
        """Join all lanes; buffers of the step are forgotten, clocks go on."""
        self.log.append("join")
        joined = {lane: clock.get(lane, 0) for lane, clock in self._clocks.items()}
        self._clocks = {lane: dict(joined) for lane in Lane}
        self._buffers.clear()

    def alive(self) -> list[str]:
        """Buffers that lanes wrote and nobody released, by name."""
        return sorted(_text(name) for name, b in self._buffers.items() if b.lane is not None and b.released is None)

    def _uses(self, issue: Issue, owner: Owner) -> Iterator[tuple[_Name, bool]]:
        """Buffers that an issue reads, and whether the allocator is told."""
        for key in dict.fromkeys((*issue.reads, *issue.pinned)):
            name = (owner.number, "value", key)
            if name not in self._buffers and key in owner.values:
                # A feed, of which the step may hold a copy that is the compute lane's memory.
                self._buffers[name] = _Buffer(None, Lane.COMPUTE)
            yield name, key in issue.foreign
        for piece in (piece for group in issue.pieces for piece in group):
            yield (owner.number, "piece", piece), piece in issue.foreign_pieces

    def _use(self, issue: Issue, name: _Name, announced: bool) -> None:
        lane, clock = issue.lane, self._clocks[issue.lane]
        buffer = self._buffers.get(name)
        if buffer is None:
            raise RaceError(issue.slot, _text(name), "is used before anything wrote it")
        if buffer.released is not None:
            raise RaceError(issue.slot, _text(name), f"is used after {buffer.released} released it")
        self._note(lane, "use", _text(name))
        source = buffer.lane
        if source is not None and source is not lane and clock.get(source, 0) < buffer.written:
            rule = f"is used on {lane.value}, and no wait orders that behind its write on {source.value}"
            raise RaceError(issue.slot, _text(name), rule)
        if buffer.home is not lane and not announced:
            buffer.uses[lane] = (clock[lane], issue.slot)

    def _writes(self, issue: Issue, owner: Owner) -> Iterator[_Name]:
        for key in issue.writes:
            if key is not None:
                yield owner.number, "value", key
        for piece in issue.gives:
            if piece is not None:
                yield owner.number, "piece", piece

    def _releases(self, issue: Issue, owner: Owner) -> Iterator[_Name]:
        for key in issue.frees:
            yield owner.number, "value", key
        for group in issue.pieces:
            for piece in group:
                yield owner.number, "piece", piece

    def _release(self, issue: Issue, name: _Name) -> None:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.released is not None:
            rule = "is released, but " + ("was never written" if buffer is None else f"{buffer.released} did so before")
            raise RaceError(issue.slot, _text(name), rule)
        self._note(issue.lane, "release", _text(name))
        buffer.released = issue.slot
        clock = self._clocks[buffer.home]
        for lane, (number, slot) in buffer.uses.items():
            if clock.get(lane, 0) < number:
                rule = (
                    f"goes back to {buffer.home.value}, which is not behind its use by {slot} on {lane.value}; "
                    "nor was the allocator told of that use (R14)"
                )
                raise RaceError(issue.slot, _text(name), rule)

    def _note(self, lane: Lane, what: str, of: object) -> None:
        self.log.append(f"{lane.value} {what} {of}")


def _home(issue: Issue, name: _Name) -> Lane:
    """The lane that allocated what an issue writes."""
    _, kind, (value, _) = name
    copies = issue.slot.op in (Op.STORE, Op.LOAD) or (kind == "value" and value in issue.stage.nondiff)
    return issue.lane if copies else issue.stage.allocates


def _text(name: _Name) -> str:
    """`x`, `x'` for what a replay wrote, `grad x/7` for the share of the reader at place 7; `@1`: of microbatch 1."""
    microbatch, kind, (value, number) = name
    label = f"grad {value}/{number}" if kind == "piece" else value + "'" * number
    return f"{label} @{microbatch}"


def _event(event: Event) -> str:
    op, (layer, stage) = event
    return f"{op.value}{'' if layer is None else f'.{layer}'}.{stage}"
