"""The contract of a token transport: what the stages `dispatch` and `combine` call.

A transport only communicates (R11): it never sorts rows. Its adjoints are hand-written, read no activation (R8) and
may return the very tensors they were given.

NOTE [ What a library's transport plugs into ]
1. `dispatch` makes an Arrival in the first pass. Whatever its library needs later (a handle, buffers, an event) goes
   into `Arrival.handle`; it may be any object.
2. The arrival is a value without gradient, pinned by stage `dispatch`: a replay gets it as `pinned=(arrival,)` and
   must send the same rows to the same places by it, without asking the other ranks again.
3. Both adjoints and `combine` get the same arrival. It lives until the backward of `dispatch` and is then dropped.
4. Launch and wait are apart: on a device the calls return when the work is queued on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from overlap.dispatch.arrival import Arrival
from overlap.dispatch.routing import Routing

Gradients = Sequence[Tensor | None]


@runtime_checkable
class Transport(Protocol):
    """Moves rows sorted by expert to the ranks that own the experts, and back. N rows of width C; M rows arrive.

    N is T*k, or experts * capacity where `routing.capacity` is set. Where `routing.covers` is False, the rows behind
    the counts belong to padding: they need not travel, and come back as zeros.
    """

    def held(self, experts: int) -> range:
        """The experts whose rows arrive here, of `experts` in all.

        Raises:
            ConfigError: They cannot be shared out evenly.
        """

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing: Routing, *, pinned: tuple[Arrival] | None = None
    ) -> tuple[Tensor, Tensor, Arrival]:
        """Send rows to their experts.

        Args:
            tokens: [N, C], sorted by expert.
            probs: [N], the weight of each row, in the same order.
            routing: The pinned choice.
            pinned: (arrival,) of the first pass in a replay.

        Returns:
            The rows [M, C] and weights [M] that this rank's experts own, and how they arrived.
        """

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Send gradients of (tokens, probs) back; one result per argument of `dispatch`, None for the routing.

        Args:
            grads: Gradients of the results of `dispatch`, None where nothing flows; None for the arrival.
            pinned: (routing, arrival).
        """

    def combine(self, rows: Tensor, routing: Routing, arrival: Arrival) -> Tensor:
        """Send expert outputs back to the ranks of their tokens: [M, C] as they arrived -> [N, C] as they were sent."""

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None, None]:
        """Send the gradient of `combine`'s result to the experts; one result per argument of `combine`.

        Args:
            grads: (gradient,), None where nothing flows.
            pinned: (routing, arrival).
        """
