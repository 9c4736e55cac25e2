"""LocalTransport: one rank owns every expert, so nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overlap.dispatch.arrival import Arrival, stay
from overlap.dispatch.routing import Routing
from overlap.dispatch.transport import Gradients


@dataclass(frozen=True, slots=True)
class LocalTransport:
    """The identity. Results alias arguments, so whoever frees values must go by storage, not by name (R14)."""

    def held(self, experts: int) -> range:
        """All of them."""
        return range(experts)

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing: Routing, *, pinned: tuple[Arrival] | None = None
    ) -> tuple[Tensor, Tensor, Arrival]:
        """Return the rows as they are."""
        return tokens, probs, stay(routing) if pinned is None else pinned[0]

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients as they are."""
        return grads[0], grads[1], None

    def combine(self, rows: Tensor, routing: Routing, arrival: Arrival) -> Tensor:
        """Return the rows as they are."""
        return rows

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None, None]:
        """Return the gradient as it is."""
        return grads[0], None, None
