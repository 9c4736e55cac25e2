"""StreamLanes: lanes as streams of an accelerator.

A stream per lane, an event only where lowering found a wait between lanes, and the allocator told of exactly the
uses that cross lanes (R14). The stream is switched only where the lane changes: a switch costs host time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from overlap.ir import Lane
from overlap.lanes import Owner
from overlap.lower import Issue

DEFAULT_PRIORITIES: Mapping[Lane, int] = {Lane.COMM: -1, Lane.P2P: -1}
"""Stream priorities (lower runs first): communication starts as soon as its input is there."""


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

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamLanes:
        """Copies of a model run on the same streams, one step at a time."""
        return self

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Switch to the issue's stream, wait, and announce its uses of other lanes' memory."""
        if not self._streams:
            self._start()
        lane = issue.lane
        stream = self._streams[lane]
        if lane is not self._lane:
            torch.accelerator.set_stream(stream)
            self._lane = lane
        for event in issue.waits:
            stream.wait_event(owner.events[event])
        for key in issue.foreign:
            for leaf in pytree.tree_leaves(owner.values[key]):
                _announce(leaf, stream)
        for piece in issue.foreign_pieces:
            if piece in owner.grads:
                _announce(owner.grads[piece], stream)

    def end(self, issue: Issue, owner: Owner) -> torch.Event | None:
        """Record the end of an issue that another lane waits for."""
        if not issue.signals:
            return None
        event = torch.Event(self._device)
        event.record(self._streams[issue.lane])
        return event

    def finish(self) -> None:
        """Join all lanes with the compute stream and make it current again."""
        if not self._streams:
            return
        compute = self._streams[Lane.COMPUTE]
        torch.accelerator.set_stream(compute)
        for stream in self._side.values():
            compute.wait_stream(stream)
        self._streams = {}
        self._lane = Lane.COMPUTE

    def _start(self) -> None:
        compute = torch.accelerator.current_stream(self._device)
        for stream in self._side.values():
            stream.wait_stream(compute)
        self._streams = {Lane.COMPUTE: compute, **self._side}
        self._lane = Lane.COMPUTE


def _announce(leaf: Any, stream: torch.Stream) -> None:
    if torch.is_tensor(leaf):
        tensor: Tensor = leaf
        tensor.record_stream(stream)
