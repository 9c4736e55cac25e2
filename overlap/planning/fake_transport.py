"""FakeTransport and LocalExperts: one rank of an expert-parallel group, whose received rows are injected.

Sizes only: for dry runs on fake tensors. A rank sends T*k rows and receives as many as the routing that is studied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overlap.dispatch import Routing
from overlap.dispatch.transport import Gradients
from overlap.model.experts import GroupedExperts
from overlap.planning.job import Job


@dataclass(frozen=True, slots=True)
class FakeTransport:
    """An all-to-all that allocates what it would receive."""

    sent: int
    """Rows that leave a rank."""
    received: int
    """Rows that reach it."""

    def dispatch(self, tokens: Tensor, probs: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """The rows that this rank's experts own."""
        return _rows(tokens, self.received), _rows(probs, self.received)

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Their gradients, back at the tokens' ranks."""
        tokens, probs = (None if grad is None else _rows(grad, self.sent) for grad in grads)
        return tokens, probs, None

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """The experts' output, back at the tokens' ranks."""
        return _rows(rows, self.sent)

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None]:
        """Its gradient, at the experts."""
        (rows,) = grads
        return None if rows is None else _rows(rows, self.received), None


def transport_of(job: Job) -> FakeTransport:
    """What a rank of the job sends and receives."""
    return FakeTransport(job.copies, job.received)


class LocalExperts(GroupedExperts):
    """The experts of one rank: counts of all experts come in, its own are the first ones."""

    def forward(self, rows: Tensor, probs: Tensor, routing: Routing) -> Tensor:
        """As GroupedExperts."""
        return super().forward(rows, probs, routing._replace(counts=routing.counts[: len(self.gate_up)]))


def _rows(like: Tensor, count: int) -> Tensor:
    return like.new_empty(count, *like.shape[1:])
