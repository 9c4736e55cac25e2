"""The contract of a token transport: what the stages `dispatch` and `combine` call.

A transport only communicates (R11). Its adjoints are hand-written, read no activation (R8) and may return the very
tensors they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from overlap.dispatch.routing import Routing

Gradients = Sequence[Tensor | None]


class Transport(Protocol):
    """Moves rows sorted by expert to the ranks that own the experts, and back. N = T*k rows of width C.

    Where `routing.covers` is False, the rows behind the counts belong to padding: they need not travel, and come back
    as zeros.
    """

    def dispatch(self, tokens: Tensor, probs: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Send rows to their experts.

        Args:
            tokens: [N, C], sorted by expert.
            probs: [N], the weight of each row, in the same order.
            routing: The pinned choice.

        Returns:
            The rows and weights that this rank's experts own.
        """

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Send gradients of (tokens, probs) back; one result per argument of `dispatch`, None for the routing.

        Args:
            grads: Gradients of the two results of `dispatch`, None where nothing flows.
            pinned: (routing,).
        """

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """Send expert outputs back to the ranks of their tokens: [N, C], still sorted by expert."""

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None]:
        """Send the gradient of `combine`'s result to the experts; one result per argument of `combine`."""
