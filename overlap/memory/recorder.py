"""MemoryRecorder: live bytes by kind at every slot border of a real step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overlap.engine import MicrobatchState
from overlap.ir import Op, StageKey
from overlap.lower import Issue, Key
from overlap.memory.bins import Border, Claims, Usage, sum_bins
from overlap.memory.gap import Gap, slot_text
from overlap.memory.tracker import Pending, StorageTracker, pending_tensors
from recompute.checks import check_kind


class MemoryRecorder:
    """Observer of one step; needs its tracker to be active around the step.

    Args:
        tracker: Follows the storages.
        gaps: One per microbatch, as `gaps_of` gives them.

    Raises:
        ConfigError: There is no tracker.
    """

    def __init__(self, tracker: StorageTracker, gaps: Sequence[Gap]) -> None:
        check_kind("tracker", tracker, StorageTracker, "a StorageTracker()")
        self._tracker = tracker
        self._gaps = gaps
        # The tables, not their owners: they are empty after the step, so nothing lives longer for having been watched.
        self._values: dict[int, Mapping[Key, Any]] = {}
        self._pending: dict[int, Mapping[StageKey, Pending]] = {}
        self._curve: list[Border] = []

    @property
    def usage(self) -> Usage:
        """What was recorded so far."""
        return Usage(curve=tuple(self._curve))

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Births belong to this slot from now on."""
        self._values[owner.number] = owner.values
        self._pending[owner.number] = owner.pending
        self._tracker.current = issue.slot.op

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Sum what is alive."""
        self._tracker.current = Op.CALL
        # A copy: garbage collection may end lives at any time.
        live = dict(self._tracker.live)
        claims = [self._claims(number) for number in self._values]
        self._curve.append(Border(slot=slot_text(issue, owner.number), bytes=sum_bins(live, claims)))

    def _claims(self, number: int) -> Claims:
        gap = self._gaps[number]
        return Claims(
            segment_inputs=self._ids(number, gap.segment_inputs),
            pinned=self._ids(number, gap.pinned),
            host=self._ids(number, gap.host),
            pending=self._tracker.ids_of(pending_tensors(self._pending[number].values())),
        )

    def _ids(self, number: int, keys: Iterable[Key]) -> list[int]:
        values = self._values[number]
        return self._tracker.ids_of([values[key] for key in keys if key in values])
