"""SymmetricMemory: expert parallelism by copy engines. Ranks of one node write rows into each other's memory.

The buffers are torch.distributed._symmetric_memory's: every rank maps those of its peers. Rows cross the link by
asynchronous copies, which copy engines do; no multiprocessor moves them. What still runs there: the barrier, one
block of a thread per rank, and the copies within one device (a rank's own rows, and rows out of its buffer).
Same bits as all_to_all: both place the same rows, and neither computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from overlap.dispatch.all_to_all import AllToAll, arrival_of
from overlap.dispatch.arrival import Arrival
from overlap.dispatch.routing import Routing
from overlap.dispatch.staging import Moves, Peers, Staging, moves_of
from overlap.parallel.collective_log import Collectives
from overlap.parallel.works import Works
from recompute.errors import ConfigError


class Traffic(NamedTuple):
    """How many rows go where; host numbers. The handle of an arrival."""

    home: int
    """Rows as they were sent, padding included."""
    there: Moves
    """To the experts."""
    back: Moves
    """And home."""

    @property
    def away(self) -> int:
        """Rows that arrive."""
        return self.there.received


class SymmetricMemory(AllToAll):
    """Expert parallelism over a group whose ranks map each other's memory.

    The counts of all ranks are exchanged in the first pass, so that each knows where its rows go in its peers' buffers
    and all agree on the size of these.

    Args:
        group: The ranks that share the experts.
        log: Takes note of what is launched.
        open_peers: Makes buffers of a size in bytes; collective. mapped_peers() gives it.
    """

    def __init__(self, group: dist.ProcessGroup, log: Collectives, open_peers: Callable[[int], Peers]) -> None:
        super().__init__(group, Works(), log)
        self._staging = Staging(open_peers)

    @property
    def nbytes(self) -> int:
        """Size of this rank's buffer."""
        return self._staging.nbytes

    def go(self, rows: Tensor, splits: Traffic, what: str) -> Tensor:  # type: ignore[override]  # its own handle
        """Launch: rows [N, ...] as they were sent -> [M, ...] as they arrive; padding stays."""
        out = rows.new_empty(splits.away, *rows.shape[1:])
        self._exchange(splits.there, rows[: splits.there.sent], out, what)
        return out

    def back(self, rows: Tensor, splits: Traffic, what: str) -> Tensor:  # type: ignore[override]  # its own handle
        """Launch: rows [M, ...] as they arrived -> [N, ...] as they were sent; zeros for padding."""
        out = rows.new_empty(splits.home, *rows.shape[1:])
        real = splits.back.received
        if real < splits.home:
            out[real:] = 0
        self._exchange(splits.back, rows, out[:real], what)
        return out

    def _exchange(self, moves: Moves, rows: Tensor, out: Tensor, what: str) -> None:
        rows = rows.contiguous()
        self._log.record("symmetric_memory", what, rows)
        self._staging.exchange(moves, rows, out)

    def _meet(self, routing: Routing) -> Arrival:
        """Find out what every rank sends to every other."""
        rank, ranks, home = self._group.rank(), self._ranks, routing.source.shape[0]
        if routing.capacity is not None:
            held = routing.counts.shape[0] // ranks
            received = routing.counts.new_full((ranks, held), routing.capacity)
            return arrival_of(received, home, _traffic([[home // ranks] * ranks] * ranks, rank, home))
        mine = routing.counts.repeat(ranks)
        everyone = torch.empty_like(mine)
        self._log.record("all_to_all", "counts", mine)
        dist.all_to_all_single(everyone, mine, group=self._group)
        counts = everyone.view(ranks, ranks, -1)
        traffic = _traffic(counts.sum(-1).tolist(), rank, home)
        return arrival_of(counts[:, rank], traffic.away, traffic)


def _traffic(table: Sequence[Sequence[int]], rank: int, home: int) -> Traffic:
    return Traffic(home, moves_of(table, rank), moves_of(list(zip(*table, strict=True)), rank))


class MappedPeers:
    """Buffers of the ranks of one node, mapped into each other. Collective over the group.

    Args:
        group: The ranks.
        device: This rank's.
        timeout: How long a barrier waits; then the device reports an error, and the next wait of the host raises it.
        nbytes: Size of each buffer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, nbytes: int) -> None:
        # Not from symm_mem.empty()'s pool: a block that comes from there again has met its peers before, and a rank
        # whose garbage is collected late would wait for them alone.
        self._buffer = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        self._handle = symm_mem.rendezvous(self._buffer, group)
        self._buffers = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        self._timeout_ms = int(timeout.total_seconds() * 1000)

    def put(self, rank: int, at: int, source: Tensor) -> None:
        """Queue a copy into a peer's buffer."""
        self._buffers[rank][at : at + source.numel()].copy_(source)

    def take(self, at: int, target: Tensor) -> None:
        """Queue a copy out of the own one."""
        target.copy_(self._buffer[at : at + target.numel()])

    def barrier(self) -> None:
        """Queue a kernel that waits for the other ranks'."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)

    def settle(self) -> None:
        """Wait for the current stream."""
        torch.accelerator.current_stream(self._buffer.device).synchronize()


def mapped_peers(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Callable[[int], Peers]:
    """What SymmetricMemory takes as `open_peers` on a GPU; arguments as MappedPeers takes them.

    Raises:
        ConfigError: The device is no GPU.
    """
    check_device(device.type)
    return partial(MappedPeers, group, device, timeout)


def check_device(kind: str) -> None:
    """Refuse devices whose memory cannot be mapped.

    Raises:
        ConfigError: The kind is not `cuda`.
    """
    if kind != "cuda":
        rule = f"maps the memory of GPUs, not of a {kind}: use all_to_all"
        raise ConfigError(field="transport", value="symmetric_memory", rule=rule)
