"""Actions: what happens between the issues of a step, on the lane of the issue that it comes before or after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlap.ir import Lane
from overlap.lanes import Lanes, Owner
from overlap.lower import Issue

Action = Callable[[], None]


@dataclass(slots=True)
class Actions:
    """What to do around the issues of some plans. Keyed by identity: whoever keeps this keeps the plans too."""

    before: dict[int, list[Action]] = field(default_factory=dict)
    after: dict[int, list[Action]] = field(default_factory=dict)

    def add_before(self, issue: Issue, action: Action) -> None:
        """Do something before an issue runs, behind what it waits for."""
        self.before.setdefault(id(issue), []).append(action)

    def add_after(self, issue: Issue, action: Action) -> None:
        """Do something when an issue has run; who waits for the issue waits for this too."""
        self.after.setdefault(id(issue), []).append(action)

    def add(self, other: Actions) -> None:
        """Take over what another one does, behind what is here."""
        for own, theirs in ((self.before, other.before), (self.after, other.after)):
            for issue, actions in theirs.items():
                own.setdefault(issue, []).extend(actions)


_NOTHING: Iterable[Action] = ()


class ActingLanes:
    """Lanes with actions between their issues.

    Args:
        lanes: The lanes.
        actions: What to do.
    """

    def __init__(self, lanes: Lanes, actions: Actions) -> None:
        self._lanes = lanes
        self._before: Mapping[int, Iterable[Action]] = actions.before
        self._after: Mapping[int, Iterable[Action]] = actions.after

    def use(self, actions: Actions) -> None:
        """Do this from now on."""
        self._before, self._after = actions.before, actions.after

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Switch to the issue's lane, then act."""
        self._lanes.begin(issue, owner)
        for action in self._before.get(id(issue), _NOTHING):
            action()

    def end(self, issue: Issue, owner: Owner) -> Any:
        """Act, then mark the end."""
        for action in self._after.get(id(issue), _NOTHING):
            action()
        return self._lanes.end(issue, owner)

    def enter(self, lane: Lane) -> None:
        """Make a lane current; nothing acts there."""
        self._lanes.enter(lane)

    def settle(self) -> None:
        """Settle the lanes."""
        self._lanes.settle()

    def finish(self) -> None:
        """Join the lanes."""
        self._lanes.finish()
