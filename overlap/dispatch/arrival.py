"""Arrival: what a microbatch's rows look like where their experts are. The first dispatch writes it, pinned (R7).

A replay and both adjoints find in it what the first pass learned from the other ranks, so that no count is exchanged
twice and the host never waits for the device again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from overlap.dispatch.routing import Routing


class Arrival(NamedTuple):
    """The rows that reached this rank, as the experts see them. M rows for L experts."""

    counts: Tensor
    """[L] int64: rows of each expert that this rank holds."""
    ends: Tensor
    """[L] int32: where each expert's rows end in expert order, the sums of `counts`; computed once, here."""
    covers: bool = True
    """Whether the counts sum to M. If not, the rows behind them belong to no expert."""
    order: Tensor | None = None
    """[M] int64: for each row in expert order, where it arrived (rows arrive by sending rank, then expert). None: they
    arrive in expert order."""
    inverse: Tensor | None = None
    """[M] int64: the inverse permutation of `order`."""
    handle: Any = None
    """What the transport itself needs to send the rows again and back: split sizes, or the object that a library hands
    out. The engine keeps it and never looks inside."""


def stay(routing: Routing) -> Arrival:
    """The arrival of rows that go nowhere: one rank holds every expert."""
    if routing.capacity is None:
        return Arrival(routing.counts, routing.ends, routing.covers)
    return Arrival(routing.counts.new_full(routing.counts.shape, routing.capacity), routing.ends)
