"""Staging: rows go straight into buffers of the ranks that want them, and from there into an ordinary tensor.

Says which bytes go where and when a buffer may be written again; how bytes reach a peer is Peers' business.
Legend: R ranks; a table's entry [r][p] is the number of rows that rank r sends to rank p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_FIRST_BYTES = 2**20
"""Half of the first buffer; a power of two, as all halves, so that rows of any type are aligned."""


class Peers(Protocol):
    """A buffer of equal size on every rank of a group, which all ranks can write. Bytes are uint8 tensors.

    On a device all of it is queued on the current stream, and the host goes on.
    """

    def put(self, rank: int, at: int, source: Tensor) -> None:
        """Copy bytes into another rank's buffer, from byte `at` on."""

    def take(self, at: int, target: Tensor) -> None:
        """Copy bytes out of this rank's buffer, from byte `at` on."""

    def barrier(self) -> None:
        """Go on when all ranks have come here; what each did before is done and visible."""

    def settle(self) -> None:
        """Hold the host until what this rank queued is done."""


class Put(NamedTuple):
    """Rows for one peer."""

    rank: int
    first: int
    """Where they begin in what this rank sends."""
    at: int
    """Where they go in what the peer gets from other ranks."""
    rows: int


class Moves(NamedTuple):
    """What one rank does to send its rows and get its own; numbers of rows."""

    puts: tuple[Put, ...]
    sent: int
    received: int
    own: int
    """Rows that it sends to itself."""
    own_first: int
    """Where these begin in what it sends."""
    own_at: int
    """Where they go: so many rows come from ranks before it, and the rest from ranks behind it."""
    most: int
    """Rows that the busiest rank gets from others: equal on all ranks."""


def moves_of(table: Sequence[Sequence[int]], rank: int) -> Moves:
    """The moves of one rank. Rows leave sorted by receiving rank and arrive sorted by sending rank.

    Args:
        table: [R][R], the same on all ranks.
        rank: Which.
    """
    ranks = range(len(table))

    def others(to: int, below: int) -> int:
        return sum(table[r][to] for r in range(below) if r != to)

    # each rank begins with its neighbour, so that no rank gets all rows at once
    turns = [(rank + step) % len(table) for step in ranks[1:]]
    return Moves(
        puts=tuple(
            Put(p, sum(table[rank][:p]), others(p, rank), table[rank][p]) for p in turns if table[rank][p]
        ),
        sent=sum(table[rank]),
        received=sum(table[r][rank] for r in ranks),
        own=table[rank][rank],
        own_first=sum(table[rank][:rank]),
        own_at=sum(table[r][rank] for r in range(rank)),
        most=max(others(p, len(table)) for p in ranks),
    )  # fmt: skip


class Staging:
    """Exchanges rows. All ranks of the group exchange in the same order, each on one stream or on joined ones.

    NOTE [ When a buffer is written again ]
    1. A buffer has two halves; exchanges use them in turns. Exchange i puts, passes barrier i, takes.
    2. A rank takes all rows out into a tensor of its own before its exchange i ends. So no stage, no microbatch in
       flight and no replay ever reads a buffer, and how long a value lives does not matter: the only edges are
       between exchanges.
    3. Right data: what exchange i takes was put before barrier i, on every rank.
    4. No early overwrite: exchange i+2 is the next that puts into the half of i. Its puts come behind barrier i+1,
       which a rank passes only when all have come there, and each takes the rows of i before that (stream order). So
       one barrier an exchange is enough. With one half it is not: a fast rank's puts of i+1 would come behind barrier
       i only, beside a slow rank's take.
    5. A larger buffer: the host waits until this rank's work is done. It has then passed all barriers so far, so all
       puts into its old buffer are done, and its own puts are too.
    An exchange in which no row leaves its rank has no barrier: the table is the same on all ranks, so all leave it out.

    Args:
        open_peers: Makes buffers of a size in bytes; collective over the group.
    """

    def __init__(self, open_peers: Callable[[int], Peers]) -> None:
        self._open_peers = open_peers
        self._half = _FIRST_BYTES
        self._peers = open_peers(2 * _FIRST_BYTES)
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Size of this rank's buffer."""
        return 2 * self._half

    def exchange(self, moves: Moves, rows: Tensor, out: Tensor) -> None:
        """Send rows, and fill `out` with what arrives.

        Args:
            moves: Of this rank.
            rows: [sent, ...], contiguous.
            out: [received, ...], contiguous, of the same type and row width.
        """
        width = rows.shape[1:].numel() * rows.element_size()
        source, target = rows.flatten().view(torch.uint8), out.flatten().view(torch.uint8)
        first, at, own = moves.own_first * width, moves.own_at * width, moves.own * width
        if own:
            target[at : at + own].copy_(source[first : first + own])
        if not moves.most:
            return
        self._reserve(moves.most * width)
        begin = self._turn * self._half
        self._turn = 1 - self._turn
        for put in moves.puts:
            there = source[put.first * width : (put.first + put.rows) * width]
            self._peers.put(put.rank, begin + put.at * width, there)
        self._peers.barrier()
        for place, part in ((begin, target[:at]), (begin + at, target[at + own :])):
            if part.numel():
                self._peers.take(place, part)

    def _reserve(self, nbytes: int) -> None:
        """Have a half hold so many bytes; all ranks ask for the same, so all grow together."""
        if nbytes > self._half:
            self._peers.settle()
            self._half = 1 << (nbytes - 1).bit_length()
            self._peers = self._open_peers(2 * self._half)
