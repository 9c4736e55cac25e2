"""FakeTransport: one rank of an expert-parallel group, whose received rows are injected.

Sizes only: for dry runs on fake tensors. A rank sends T*k rows and receives as many as the routing that is studied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap.dispatch.arrival import Arrival
from overlap.dispatch.routing import Routing
from overlap.dispatch.transport import Gradients
from overlap.planning.job import Job


@dataclass(frozen=True, slots=True)
class FakeTransport:
    """An all-to-all that allocates what it would receive."""

    sent: int
    """Rows that leave a rank."""
    received: int
    """Rows that reach it."""
    experts: int
    """Those that it holds, of a layer."""

    def held(self, experts: int) -> range:
        """The first ones: which they are does not matter here."""
        return range(self.experts)

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing: Routing, *, pinned: tuple[Arrival] | None = None
    ) -> tuple[Tensor, Tensor, Arrival]:
        """The rows that this rank's experts own."""
        arrival = self._arrival(routing) if pinned is None else pinned[0]
        return _rows(tokens, self.received), _rows(probs, self.received), arrival

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Their gradients, back at the tokens' ranks."""
        tokens, probs = (None if grad is None else _rows(grad, self.sent) for grad in grads[:2])
        return tokens, probs, None

    def combine(self, rows: Tensor, routing: Routing, arrival: Arrival) -> Tensor:
        """The experts' output, back at the tokens' ranks."""
        return _rows(rows, self.sent)

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None, None]:
        """Its gradient, at the experts."""
        (rows,) = grads
        return None if rows is None else _rows(rows, self.received), None, None

    def _arrival(self, routing: Routing) -> Arrival:
        """Rows arrive by sending rank, then expert: several ranks and several experts make an order necessary."""
        counts, ends = _rows(routing.counts, self.experts), _rows(routing.ends, self.experts)
        if self.experts in (1, len(routing.counts)):
            return Arrival(counts, ends)
        order, inverse = (counts.new_empty(self.received, dtype=torch.int64) for _ in range(2))
        return Arrival(counts, ends, True, order, inverse)


def transport_of(job: Job) -> FakeTransport:
    """What a rank of the job sends, receives and holds."""
    return FakeTransport(job.copies, job.received, job.local_experts)


def _rows(like: Tensor, count: int) -> Tensor:
    return like.new_empty(count, *like.shape[1:])
