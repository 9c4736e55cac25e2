"""StreamLanes: lanes as streams of an accelerator.

A stream per lane, and an event only where lowering found a wait between lanes. The stream is switched only where the
lane changes: a switch costs host time.

NOTE [ Memory that crosses lanes ]
1. A freed buffer goes back to the lane that allocated it, at the point where that lane stands.
2. So a buffer that another lane uses is held until its own lane has waited for an event behind that use.
3. A use is more than a read: a graph keeps inputs, and a pending weight gradient keeps tensors, for a later slot.
4. Lowering gives such a wait for every use whose result comes back. What compute took of other lanes ends with the plan
   (`settle`): backwards in a row, as in a pipeline, would pile it up. The rest ends with the step (`finish`).
The allocator's own means, record_stream, frees at a moment that depends on how far the host runs ahead; with it an
H200 reserved 0.7 GiB more for the same step (proxy-8, uniform 1: 11408 MiB against 10722).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overlap.ir import SETTLING, Lane
from overlap.lanes import Owner
from overlap.lower import Issue

DEFAULT_PRIORITIES: Mapping[Lane, int] = {Lane.COMM: -1, Lane.P2P: -1}
"""Stream priorities (lower runs first): communication starts as soon as its input is there."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of an issue that another lane waits for."""

    event: torch.Event
    lane: Lane
    number: int
    """Of the issue within its lane."""


class StreamLanes:
    """Lanes on one accelerator device.

    The compute lane is the stream that is current when a step begins. The caller's allocations and later work are
    ordered with the step: `begin` of the first issue and `finish` join all lanes with it.

    Args:
        device: The accelerator.
        priorities: Priority of the streams that are made here.
    """

    def __init__(self, device: torch.device, priorities: Mapping[Lane, int] = DEFAULT_PRIORITIES) -> None:
        self._device = device
        self._side: dict[Lane, torch.Stream] = {
            lane: torch.Stream(device, priority=priorities.get(lane, 0)) for lane in Lane if lane is not Lane.COMPUTE
        }
        self._streams: dict[Lane, torch.Stream] = {}
        self._lane = Lane.COMPUTE
        self._issued = dict.fromkeys(Lane, 0)
        self._held: dict[tuple[Lane, Lane], deque[tuple[int, Any]]] = {}
        """Per (owner, user) lanes, what the user's issues use of the owner's memory, oldest first."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamLanes:
        """Copies of a model run on the same streams, one step at a time."""
        return self

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Switch to the issue's stream, wait, and hold what it uses of other lanes' memory."""
        lane = issue.lane
        self.enter(lane)
        stream = self._streams[lane]
        self._issued[lane] += 1
        for event in issue.waits:
            mark: Mark = owner.events[event]
            stream.wait_event(mark.event)
            self._release(lane, mark)
        for key, home in zip(issue.foreign, issue.foreign_owners, strict=False):
            self._hold(home, lane, owner.values[key])
        for piece, home in zip(issue.foreign_pieces, issue.piece_owners, strict=False):
            if piece in owner.grads:
                self._hold(home, lane, owner.grads[piece])
        for place, home in issue.foreign_leaves:
            self._hold(home, lane, owner.tapes[issue.stage.key].leaves[place])
        for home in issue.pending_owners:
            self._hold(home, lane, [item.tensors for item in owner.pending[issue.stage.key][0].pending])

    def end(self, issue: Issue, owner: Owner) -> Mark | None:
        """Record the end of an issue that another lane waits for."""
        if not issue.signals:
            return None
        event = torch.Event(self._device)
        event.record(self._streams[issue.lane])
        return Mark(event, issue.lane, self._issued[issue.lane])

    def enter(self, lane: Lane) -> None:
        """Make the lane's stream current."""
        if not self._streams:
            self._start()
        if lane is not self._lane:
            torch.accelerator.set_stream(self._streams[lane])
            self._lane = lane

    def settle(self) -> None:
        """Make the compute stream current; streams whose memory it used wait for it, and let that go."""
        self.enter(Lane.COMPUTE)
        lending = [lane for lane in SETTLING if self._held.get((lane, Lane.COMPUTE))]
        if lending:
            event = torch.Event(self._device)
            event.record(self._streams[Lane.COMPUTE])
        for lane in lending:
            self._streams[lane].wait_event(event)
            self._held[lane, Lane.COMPUTE].clear()

    def finish(self) -> None:
        """Join all lanes with each other and make the compute stream current again."""
        if not self._streams:
            return
        compute = self._streams[Lane.COMPUTE]
        torch.accelerator.set_stream(compute)
        for stream in self._side.values():
            compute.wait_stream(stream)
        for stream in self._side.values():
            stream.wait_stream(compute)
        self._held.clear()
        self._streams = {}
        self._lane = Lane.COMPUTE

    def _start(self) -> None:
        compute = torch.accelerator.current_stream(self._device)
        for stream in self._side.values():
            stream.wait_stream(compute)
        self._streams = {Lane.COMPUTE: compute, **self._side}
        self._lane = Lane.COMPUTE

    def _hold(self, home: Lane, user: Lane, value: Any) -> None:
        self._held.setdefault((home, user), deque()).append((self._issued[user], value))

    def _release(self, lane: Lane, mark: Mark) -> None:
        """Let go of this lane's memory that the other lane used up to the mark."""
        held = self._held.get((lane, mark.lane))
        while held and held[0][0] <= mark.number:
            held.popleft()
