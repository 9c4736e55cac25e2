"""What each lane is ordered behind, slot by slot: which waits between lanes are implied by earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlap.ir import Lane, Op, StageKey

Past = tuple[int, tuple[Op, StageKey]]
"""The end of a slot of an earlier plan: (microbatch, event)."""


@dataclass(frozen=True, slots=True)
class View:
    """What a lane is ordered behind at some point: slots of this plan by lane, and ends of earlier plans' slots."""

    slots: Mapping[Lane, int]
    past: frozenset[Past]


NOTHING = View({}, frozenset())


class Clocks:
    """What each lane knows of the others now."""

    def __init__(self) -> None:
        self._views: dict[Lane, View] = {}

    def view(self, lane: Lane) -> View:
        """What `lane` is behind now."""
        return self._views.get(lane, NOTHING)

    def needs_wait(self, lane: Lane, other: Lane, index: int, past: Past) -> bool:
        """Whether `lane` is not yet behind a slot of `other`.

        Args:
            lane: Who may have to wait.
            other: Lane of the slot.
            index: Its place in this plan; -1: it is in an earlier one. A lane that is behind any slot of this plan on
                `other` is behind all of earlier plans there; among those of earlier plans the order is not known.
            past: Names it in that case.
        """
        view = self.view(lane)
        return lane is not other and view.slots.get(other, -1) < max(index, 0) and (index >= 0 or past not in view.past)

    def wait(self, lane: Lane, other: Lane, index: int, past: Past, then: View) -> None:
        """Order `lane` behind a slot of `other`, and behind all that `other` was behind then."""
        mine = self.view(lane)
        slots = dict(mine.slots)
        for known, place in {**then.slots, other: index}.items():
            if known is not lane and place >= 0:
                slots[known] = max(slots.get(known, -1), place)
        self._views[lane] = View(slots, mine.past | then.past | ({past} if index < 0 else frozenset()))
