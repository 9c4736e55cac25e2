"""Rows pass through peers' buffers: in which places, and in which order relative to each other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overlap.dispatch.staging import Moves, Staging, moves_of

Table = Sequence[Sequence[int]]
ONE_RANK_GETS_ALL: Table = ((3, 0, 0), (4, 0, 0), (5, 0, 0))
ONE_RANK_SENDS_ALL: Table = ((0, 0, 0), (2, 3, 4), (0, 0, 0))
NOTHING_LEAVES: Table = ((2, 0, 0), (0, 0, 0), (0, 0, 5))
UNEVEN: Table = ((1, 2, 3), (4, 0, 6), (0, 8, 9))
WIDE: Table = ((0, 9000, 1), (2, 0, 3), (4, 5, 0))
"""Needs a larger buffer than the first."""


class Access(NamedTuple):
    """One use of a buffer."""

    exchange: int
    rank: int
    barriers: int
    """That its rank had passed before."""
    writes: bool
    buffer: tuple[int, int]
    """Whose, and which of its owner's."""
    start: int
    stop: int

    def touches(self, other: Access) -> bool:
        """Whether both use the same bytes and one writes them."""
        same = self.buffer == other.buffer and self.start < other.stop and other.start < self.stop
        return same and (self.writes or other.writes)


class OneHalf(Staging):
    """Control: every exchange uses the same half."""

    def exchange(self, moves: Moves, rows: Tensor, out: Tensor) -> None:
        self._turn = 0
        super().exchange(moves, rows, out)


class Rank:
    """One rank's run: opens its buffers and notes their uses."""

    def __init__(self, rank: int, accesses: list[Access]) -> None:
        self.number, self.exchange, self.barriers, self.opened, self.settled = rank, 0, 0, 0, 0
        self._accesses = accesses

    def open(self, nbytes: int) -> Recorder:
        self.opened += 1
        return Recorder(self)

    def note(self, writes: bool, owner: int, at: int, part: Tensor) -> None:
        buffer = (owner, self.opened)
        self._accesses.append(
            Access(self.exchange, self.number, self.barriers, writes, buffer, at, at + part.numel())
        )  # fmt: skip


class Recorder:
    """Peers that move nothing."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def put(self, rank: int, at: int, source: Tensor) -> None:
        self._rank.note(True, rank, at, source)

    def take(self, at: int, target: Tensor) -> None:
        self._rank.note(False, self._rank.number, at, target)

    def barrier(self) -> None:
        self._rank.barriers += 1

    def settle(self) -> None:
        self._rank.settled += 1


def accesses_of(kind: type[Staging], tables: Sequence[Table]) -> list[Access]:
    """All uses of buffers in a run of exchanges of rows of 200 bytes."""
    accesses: list[Access] = []
    for number in range(3):
        rank = Rank(number, accesses)
        staging = kind(rank.open)
        for rank.exchange, table in enumerate(tables):
            moves = moves_of(table, number)
            rows, out = (torch.zeros(n, 200, dtype=torch.uint8) for n in (moves.sent, moves.received))
            staging.exchange(moves, rows, out)
    return accesses


def races(accesses: list[Access]) -> list[tuple[Access, Access]]:
    """Uses of the same bytes by two ranks with no barrier between them.

    What a rank does behind its b-th barrier comes after all that ranks did before theirs.
    """
    return [
        (a, b)
        for a, b in itertools.combinations(accesses, 2)
        if a.touches(b) and a.rank != b.rank and a.barriers == b.barriers
    ]


tables = st.lists(st.sampled_from([ONE_RANK_GETS_ALL, ONE_RANK_SENDS_ALL, NOTHING_LEAVES, UNEVEN, WIDE]), max_size=6)


@given(tables)
def test_barriers_order_every_two_uses_of_the_same_bytes(run: list[Table]) -> None:
    """Whatever exchanges follow each other: other microbatches', a replay's, backward's."""
    if not run:
        return
    accesses = accesses_of(Staging, run)
    assert races(accesses) == []
    for read in (access for access in accesses if not access.writes):
        before = [a for a in accesses if a.touches(read) and a.barriers < read.barriers and a.rank != read.rank]
        # nothing written later than by its own exchange may have replaced what it reads
        assert max(write.exchange for write in before) == read.exchange


def test_control_one_half_is_a_race() -> None:
    assert races(accesses_of(OneHalf, [UNEVEN, UNEVEN]))
    assert not races(accesses_of(OneHalf, [UNEVEN]))


def test_a_barrier_an_exchange_that_leaves_the_rank_and_a_wait_of_the_host_for_a_larger_buffer() -> None:
    rank = Rank(0, [])
    staging = Staging(rank.open)
    found = []
    for table in (NOTHING_LEAVES, UNEVEN, NOTHING_LEAVES, WIDE, UNEVEN):
        moves = moves_of(table, 0)
        rows, out = (torch.zeros(n, 200, dtype=torch.uint8) for n in (moves.sent, moves.received))
        staging.exchange(moves, rows, out)
        found.append((rank.barriers, rank.settled, rank.opened))
    assert found == [(0, 0, 1), (1, 0, 1), (1, 0, 1), (2, 1, 2), (3, 1, 2)]


class Shared:
    """Buffers of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def open(self, rank: int, nbytes: int) -> SharedPeers:
        self._buffers[rank, nbytes] = torch.full((nbytes,), 255, dtype=torch.uint8)
        self._barrier.wait()
        size = self._barrier.parties
        return SharedPeers([self._buffers[r, nbytes] for r in range(size)], rank, self._barrier)


class SharedPeers:
    """Peers over threads."""

    def __init__(self, buffers: list[Tensor], rank: int, barrier: threading.Barrier) -> None:
        self._buffers, self._rank, self._barrier = buffers, rank, barrier

    def put(self, rank: int, at: int, source: Tensor) -> None:
        self._buffers[rank][at : at + source.numel()].copy_(source)

    def take(self, at: int, target: Tensor) -> None:
        target.copy_(self._buffers[self._rank][at : at + target.numel()])

    def barrier(self) -> None:
        self._barrier.wait()

    def settle(self) -> None:
        pass


def exchange_on_threads(run: Sequence[Table], sent: list[list[Tensor]]) -> list[list[Tensor]]:
    """What every rank receives, by exchange."""
    size = len(run[0])
    shared = Shared(size)
    got: list[list[Tensor]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        staging = Staging(lambda nbytes: shared.open(rank, nbytes))
        for table, rows in zip(run, sent[rank], strict=True):
            moves = moves_of(table, rank)
            out = rows.new_full((moves.received, *rows.shape[1:]), -1)
            staging.exchange(moves, rows, out)
            got[rank].append(out)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 70)])
def test_rows_arrive_by_sending_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    run = [UNEVEN, ONE_RANK_GETS_ALL, NOTHING_LEAVES, WIDE, ONE_RANK_SENDS_ALL, UNEVEN, UNEVEN]
    sent = [[torch.randint(100, (sum(table[rank]), *shape)).to(dtype) for table in run] for rank in range(3)]
    got = exchange_on_threads(run, sent)
    for number, table in enumerate(run):
        parts = [rows[number].split(list(table[rank])) for rank, rows in enumerate(sent)]
        for rank in range(3):
            assert torch.equal(got[rank][number], torch.cat([part[rank] for part in parts]))


def test_one_rank_and_no_rows() -> None:
    assert torch.equal(exchange_on_threads([((2,),)], [[torch.arange(2)]])[0][0], torch.arange(2))
    nothing = torch.empty(0, 4)
    assert exchange_on_threads([((0, 0), (0, 0))], [[nothing], [nothing]])[1][0].shape == (0, 4)


def test_ranks_begin_with_different_peers() -> None:
    """Else all would write to one rank at a time."""
    full = [[1] * 4] * 4
    assert [[put.rank for put in moves_of(full, rank).puts] for rank in range(4)] == [
        [1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]
    ]  # fmt: skip
