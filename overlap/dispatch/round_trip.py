"""RoundTrip: what stand-ins for a network share. One rank owns every expert; rows go out and come back the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overlap.dispatch.arrival import Arrival, stay
from overlap.dispatch.routing import Routing
from overlap.dispatch.transport import Gradients


class RoundTrip(ABC):
    """A transport that takes time: rows and their gradients make a trip, the weights are few bytes and are copied.

    Copied, because what a transport hands on is its lane's memory (R14): a reader on a third lane, as the copy of a
    segment input to the host, would be waited for by the wrong lane.
    """

    @abstractmethod
    def round_trip(self, rows: Tensor) -> Tensor:
        """A copy of `rows` that made the trip, outside any graph."""

    def held(self, experts: int) -> range:
        """All of them."""
        return range(experts)

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing: Routing, *, pinned: tuple[Arrival] | None = None
    ) -> tuple[Tensor, Tensor, Arrival]:
        """Send the rows round."""
        return self._trip(tokens), probs.clone(), stay(routing) if pinned is None else pinned[0]

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Send the rows' gradient round; the weights' goes to the lane that made it, as it is."""
        tokens = grads[0]
        return None if tokens is None else self._trip(tokens), grads[1], None

    def combine(self, rows: Tensor, routing: Routing, arrival: Arrival) -> Tensor:
        """Send the rows round."""
        return self._trip(rows)

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None, None]:
        """Send the gradient round."""
        rows = grads[0]
        return None if rows is None else self._trip(rows), None, None

    def _trip(self, rows: Tensor) -> Tensor:
        result: Tensor = _Trip.apply(rows, self)  # type: ignore[no-untyped-call]  # torch's
        return result


class _Trip(torch.autograd.Function):
    """The trip, differentiable: the gradient makes it too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: RoundTrip) -> Tensor:
        """There and back."""
        ctx.transport = transport
        return transport.round_trip(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """There and back."""
        return ctx.transport.round_trip(gradients[0]), None
