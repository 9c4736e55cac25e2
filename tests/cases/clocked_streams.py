"""StreamLanes with streams that know what they are behind, and checks of every use and of every storage's end.

A stream has a vector clock: per stream, the number of the last issue there that it is ordered behind. An event is a
copy of one. Unlike RecordingLanes, which read what a plan announces, these lanes follow the tensors of a real step and
what StreamLanes makes of the plan: what it waits for, what it holds, and when it lets go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from overlap.ir import Lane, Op, StageKey
from overlap.lanes import Owner
from overlap.lower import Issue
from overlap.streams import Mark, StreamLanes
from tests.cases.model import Box


@dataclass(eq=False, slots=True)
class ClockedStream:
    """A stream that runs nothing."""

    clock: dict[ClockedStream, int] = field(default_factory=dict)

    def launch(self) -> int:
        """One more issue; its number."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def wait_event(self, event: ClockedEvent) -> None:
        self._wait(event.clock)

    def wait_stream(self, stream: ClockedStream) -> None:
        self._wait(stream.clock)

    def _wait(self, clock: dict[ClockedStream, int]) -> None:
        for stream, number in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), number)


class ClockedEvent:
    """How far a stream was when it recorded this."""

    def __init__(self, device: torch.device) -> None:
        self.clock: dict[ClockedStream, int] = {}

    def record(self, stream: ClockedStream) -> None:
        self.clock = dict(stream.clock)


def use_clocked_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let StreamLanes make these streams and events on a machine that has none."""
    current = [ClockedStream()]
    monkeypatch.setattr(torch, "Stream", lambda device, priority: ClockedStream())
    monkeypatch.setattr(torch, "Event", ClockedEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.accelerator, "set_stream", current.append)


@dataclass(slots=True)
class Memory:
    """A storage that an issue wrote into the table."""

    maker: str
    home: ClockedStream
    number: int
    """Of the issue within its stream."""
    uses: dict[ClockedStream, tuple[int, str]] = field(default_factory=dict)
    """Per other stream, the last issue that used it: number and slot."""


def tensors_of(items: Any) -> list[Tensor]:
    """Every tensor in it: a routing is a tuple of them."""
    return [leaf for leaf in pytree.tree_leaves(items) if torch.is_tensor(leaf)]


class CheckedLanes(StreamLanes):
    """Lanes that list what would be a race on a device.

    A use must be ordered behind the issue that made the storage. When a storage dies, its memory goes back to the
    stream that made it, which must be behind every use on other streams. The first issue of a step comes behind what
    the caller launched before, and what the caller launches later behind all of the step.

    Attributes:
        faults: A line for each race.
        foreign: How many uses were on another stream than the maker's.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.faults: list[str] = []
        self.foreign = 0
        self._memory: dict[int, Memory] = {}
        self._saved: dict[tuple[int, StageKey], list[weakref.ref[Box]]] = {}
        self._running: tuple[int, StageKey] | None = None

    def begin(self, issue: Issue, owner: Owner) -> None:
        super().begin(issue, owner)
        stream = self._clocked(issue)
        number = stream.launch()
        slot = f"{issue.slot.op.value}{owner.number}.{issue.stage.label}"
        for tensor in tensors_of(list(self._used(issue, owner))):
            self._use(tensor, stream, number, slot)
        self._running = (owner.number, issue.stage.key)

    def end(self, issue: Issue, owner: Owner) -> Mark | None:
        self._running = None
        stream = self._clocked(issue)
        made = Memory(f"{issue.slot.op.value}{owner.number}.{issue.stage.label}", stream, stream.clock[stream])
        values = [owner.values[key] for key in issue.writes if key is not None]
        pieces = [owner.grads.get(piece) for piece in issue.gives if piece is not None]
        for tensor in tensors_of([values, pieces]):
            self._follow(tensor, made)
        return super().end(issue, owner)

    def finish(self) -> None:
        streams = dict(self._streams)
        super().finish()
        self._check_joined(streams, "after the step")

    def save(self, box: Box) -> None:
        """Note what a graph saves, for the backward that will read it."""
        if self._running is not None:
            self._saved.setdefault(self._running, []).append(weakref.ref(box))

    def _start(self) -> None:
        cast(ClockedStream, torch.accelerator.current_stream(self._device)).launch()
        super()._start()
        self._check_joined(self._streams, "before the step")

    def _check_joined(self, streams: Mapping[Lane, torch.Stream], when: str) -> None:
        ends = {lane: cast(ClockedStream, stream) for lane, stream in streams.items()}
        for lane, stream in ends.items():
            for other, end in ends.items():
                if stream.clock.get(end, 0) < end.clock.get(end, 0):
                    self.faults.append(f"{lane.value} is not joined with {other.value} {when}")

    def _clocked(self, issue: Issue) -> ClockedStream:
        return cast(ClockedStream, self._streams[issue.lane])

    def _used(self, issue: Issue, owner: Owner) -> Iterator[Any]:
        """All that an issue reads: what the table holds, what its graph saved, what its W slot was left."""
        yield from (owner.values[key] for key in (*issue.reads, *issue.pinned))
        yield from (owner.grads.get(piece) for pieces in issue.pieces for piece in pieces)
        if issue.slot.op is Op.BACKWARD:
            boxes = (reference() for reference in self._saved.pop((owner.number, issue.stage.key), ()))
            yield from (box.tensor for box in boxes if box is not None)
        if issue.slot.op is Op.WGRAD:
            yield from (tensor for item in owner.pending[issue.stage.key][0].pending for tensor in item.tensors)

    def _use(self, tensor: Tensor, stream: ClockedStream, number: int, slot: str) -> None:
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None or memory.home is stream:
            return
        self.foreign += 1
        memory.uses[stream] = (number, slot)
        if stream.clock.get(memory.home, 0) < memory.number:
            self.faults.append(f"{slot} does not wait for {memory.maker}")

    def _follow(self, tensor: Tensor, made: Memory) -> None:
        storage = tensor.untyped_storage()
        # What is known was passed on: it stays its maker's.
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = Memory(made.maker, made.home, made.number)
            weakref.finalize(storage, self._died, storage._cdata).atexit = False

    def _died(self, address: int) -> None:
        memory = self._memory.pop(address)
        for stream, (number, slot) in memory.uses.items():
            if memory.home.clock.get(stream, 0) < number:
                self.faults.append(f"memory of {memory.maker} goes back while {slot} uses it")
