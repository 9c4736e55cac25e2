"""MemoryRecorder: live bytes by kind at every slot border of a real step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlap.engine import MicrobatchState
from overlap.ir import Op
from overlap.lower import Issue, Key
from overlap.memory.bins import Border, Claims, Usage, sum_bins
from overlap.memory.gap import Gap, slot_text
from overlap.memory.tracker import StorageTracker, pending_tensors


class MemoryRecorder:
    """Observer of one step; needs its tracker to be active around the step.

    Args:
        tracker: Follows the storages.
        gaps: One per microbatch, as `gaps_of` gives them.
    """

    def __init__(self, tracker: StorageTracker, gaps: Sequence[Gap]) -> None:
        self._tracker = tracker
        self._gaps = gaps
        self._owners: dict[int, MicrobatchState] = {}
        self._curve: list[Border] = []

    @property
    def usage(self) -> Usage:
        """What was recorded so far."""
        return Usage(curve=tuple(self._curve))

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Births belong to this slot from now on."""
        self._owners[owner.number] = owner
        self._tracker.current = issue.slot.op

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Sum what is alive."""
        self._tracker.current = Op.CALL
        live = dict(self._tracker.live)
        claims = [self._claims(state) for state in self._owners.values()]
        self._curve.append(Border(slot=slot_text(issue, owner.number), bytes=sum_bins(live, claims)))

    def _claims(self, owner: MicrobatchState) -> Claims:
        gap = self._gaps[owner.number]
        return Claims(
            segment_inputs=self._ids(owner, gap.segment_inputs),
            pinned=self._ids(owner, gap.pinned),
            pending=self._tracker.ids_of(pending_tensors(owner)),
        )

    def _ids(self, owner: MicrobatchState, keys: Iterable[Key]) -> list[int]:
        return self._tracker.ids_of([owner.values[key] for key in keys if key in owner.values])
