"""TimedLanes: stream lanes that time every slot, and give the step as a Timeline.

For looking, not for speed: two timing events a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from overlap.ir import Lane, Slot
from overlap.lanes import Owner
from overlap.lower import Issue
from overlap.streams import DEFAULT_PRIORITIES, Mark, StreamLanes
from overlap.timeline import Span, Timeline


class TimedLanes(StreamLanes):
    """Lanes on an accelerator, with a record of when each slot ran there.

    Args:
        device: The accelerator.
        priorities: As StreamLanes takes them.
        event: Makes a timing event; graph_event() makes those that a CUDA graph records at every launch.
    """

    def __init__(
        self,
        device: torch.device,
        priorities: Mapping[Lane, int] = DEFAULT_PRIORITIES,
        event: Callable[[], torch.Event] | None = None,
    ) -> None:
        super().__init__(device, priorities)
        self._event = event or partial(torch.Event, device, enable_timing=True)
        self._origin = self._event()
        self._marks: list[tuple[Slot, Lane, torch.Event, torch.Event]] = []

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Mark the start, behind the waits."""
        super().begin(issue, owner)
        start, end = self._event(), self._event()
        if not self._marks:
            self._origin.record()
        start.record()
        self._marks.append((replace(issue.slot, microbatch=owner.number), issue.lane, start, end))

    def end(self, issue: Issue, owner: Owner) -> Mark | None:
        """Mark the end."""
        self._marks[-1][3].record()
        return super().end(issue, owner)

    def forget(self) -> None:
        """Forget the slots up to here; waits for the device."""
        torch.accelerator.synchronize(self._device)
        self._marks.clear()

    def timeline(self, name: str) -> Timeline:
        """The slots since the last forget(), in issue order; waits for the device."""
        torch.accelerator.synchronize(self._device)
        spans = tuple(
            Span(slot=slot, lane=lane, start=self._milliseconds(start), end=self._milliseconds(end))
            for slot, lane, start, end in self._marks
        )
        return Timeline(name=name, spans=spans)

    def _milliseconds(self, event: torch.Event) -> float:
        return float(self._origin.elapsed_time(event))


def graph_event() -> torch.Event:
    """A timing event whose time is that of the last launch of the CUDA graph that recorded it."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]  # torch's
