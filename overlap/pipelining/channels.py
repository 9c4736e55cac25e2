"""Channels: how a state or its gradient gets from one virtual stage to its neighbour.

Within a rank it is handed over without a copy. Between ranks a receive gets its buffer when it is posted, and the
buffer lives as long as its contents are used: there are as many as microbatches are in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.ir import Lane
from overlap.lanes import Lanes
from recompute.errors import RecomputeError


class Channel(Protocol):
    """One direction between two neighbouring virtual stages; messages are told apart by microbatch."""

    @property
    def lane(self) -> Lane:
        """Lane of the stages that use it."""

    def expect(self, microbatch: int, shape: Sequence[int]) -> None:
        """Post the receive."""

    def coming(self, microbatch: int) -> Tensor:
        """Where the message arrives; its contents may not be read before take()."""

    def take(self, microbatch: int) -> Tensor:
        """Wait for the message and give it away."""

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Send; the tensor must not be written to afterwards."""

    def send_zeros(self, microbatch: int, shape: Sequence[int]) -> None:
        """Send a gradient where none came."""

    def settle(self, microbatch: int) -> None:
        """The other side is known to have the message: let go of it here."""

    def finish(self) -> None:
        """Wait for everything sent."""

    def clear(self) -> bool:
        """Forget everything: the step failed. Says whether messages of it may still be under way."""


class Handover:
    """Both stages are on this rank.

    Args:
        dtype: Of the messages.
        device: Of the messages.
    """

    lane = Lane.COMPUTE

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tensors: dict[int, Tensor] = {}

    def another(self) -> Handover:
        """A channel for the same messages."""
        return Handover(self._dtype, self._device)

    def expect(self, microbatch: int, shape: Sequence[int]) -> None:
        """Nothing is received."""

    def coming(self, microbatch: int) -> Tensor:
        """What was sent."""
        return self._tensors[microbatch]

    def take(self, microbatch: int) -> Tensor:
        """Give it away."""
        return self._tensors.pop(microbatch)

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Put it where the neighbour finds it."""
        self._tensors[microbatch] = tensor

    def send_zeros(self, microbatch: int, shape: Sequence[int]) -> None:
        """Put zeros there."""
        self.send(microbatch, torch.zeros(tuple(shape), dtype=self._dtype, device=self._device))

    def settle(self, microbatch: int) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        """Nothing is on its way."""

    def clear(self) -> bool:
        """Drop what nobody took; it went nowhere."""
        self._tensors.clear()
        return False


class Wire:
    """The other stage is on another rank.

    Args:
        peer: Its rank within the group.
        group: The pipeline's process group.
        lanes: A receive is posted on the P2P lane, which then owns its buffer.
        dtype: Of the messages.
        device: Of the messages.

    Attributes:
        live: Receive buffers whose memory is in use now.
        peak: Most at once.
    """

    lane = Lane.P2P

    def __init__(
        self, peer: int, group: dist.ProcessGroup | None, lanes: Lanes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._peer = peer
        self._group = group
        self._lanes = lanes
        self._dtype = dtype
        self._device = device
        self._coming: dict[int, tuple[Tensor, dist.Work]] = {}
        self._sent: dict[int, tuple[Tensor, dist.Work]] = {}
        self._used = False
        """Whether anything was posted since the step began."""
        self.live = 0
        self.peak = 0

    def expect(self, microbatch: int, shape: Sequence[int]) -> None:
        """Allocate the buffer and post the receive."""
        self._used = True
        self._lanes.enter(Lane.P2P)
        buffer = self.allocate(microbatch, shape)
        self._coming[microbatch] = (buffer, _posted(dist.irecv(buffer, group=self._group, group_src=self._peer)))
        self._lanes.enter(Lane.COMPUTE)

    def allocate(self, microbatch: int, shape: Sequence[int]) -> Tensor:
        """A buffer for a message, counted as long as its memory is in use."""
        buffer = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        self.live += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(buffer.untyped_storage(), _released(weakref.ref(self))).atexit = False
        return buffer

    def coming(self, microbatch: int) -> Tensor:
        """The buffer."""
        return self._coming[microbatch][0]

    def take(self, microbatch: int) -> Tensor:
        """Wait for the message on the current lane."""
        buffer, work = self._coming.pop(microbatch)
        work.wait()
        return buffer

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Start sending; the tensor is held until it has left."""
        if tensor.dtype is not self._dtype:
            raise RecomputeError(f"a pipeline stage hands over {tensor.dtype}, but {self._dtype} was announced")
        self._used = True
        self._sent = {number: item for number, item in self._sent.items() if not item[1].is_completed()}
        message = tensor.contiguous()
        self._sent[microbatch] = (message, _posted(dist.isend(message, group=self._group, group_dst=self._peer)))

    def send_zeros(self, microbatch: int, shape: Sequence[int]) -> None:
        """Send zeros."""
        self.send(microbatch, torch.zeros(tuple(shape), dtype=self._dtype, device=self._device))

    def settle(self, microbatch: int) -> None:
        """Drop a message that has left."""
        if microbatch in self._sent:
            self._sent.pop(microbatch)[1].wait()

    def finish(self) -> None:
        """Wait for everything sent."""
        for microbatch in list(self._sent):
            self.settle(microbatch)
        self._used = False

    def clear(self) -> bool:
        """Forget what is on its way; how far the other side got is not known here."""
        self._coming.clear()
        self._sent.clear()
        return self._used


def _released(wire: weakref.ref[Wire]) -> Callable[[], None]:
    def release() -> None:
        alive = wire()
        if alive is not None:
            alive.live -= 1

    return release


def _posted(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not in the pipeline's group")
    return work
