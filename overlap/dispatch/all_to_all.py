"""AllToAll: experts are spread over the ranks of a group; rows travel by torch.distributed's all-to-all.

The first pass exchanges counts, once per microbatch and layer; the host waits for them, because split sizes are host
numbers. Replay, combine and both adjoints find them in the arrival. With a capacity every size is known beforehand
and nothing is exchanged but rows.
torch's own differentiable all-to-all waits at once in its backward, so it is not used (R11).
Legend: N rows sent, M rows that arrive, C width, E experts, R ranks, L = E/R experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.dispatch.arrival import Arrival
from overlap.dispatch.routing import Routing
from overlap.dispatch.transport import Gradients
from overlap.parallel.collective_log import Collectives
from overlap.parallel.works import Works
from recompute.errors import ConfigError


class Splits(NamedTuple):
    """How many rows go where; host numbers."""

    home: int
    """N: rows as they were sent, padding included."""
    away: int
    """M: rows that arrive."""
    sent: list[int] | None
    """Rows for each rank; None: the same for all."""
    received: list[int] | None
    """Rows from each rank; None: the same from all."""


class AllToAll:
    """Expert parallelism over a process group.

    Args:
        group: The ranks that share the experts; rank r of it holds slice r.
        works: Takes what is launched.
        log: Takes note of it.
    """

    def __init__(self, group: dist.ProcessGroup, works: Works, log: Collectives) -> None:
        self._group = group
        self._ranks = group.size()
        self._works = works
        self._log = log

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAll:
        """Copies of a model communicate in the same group."""
        return self

    def held(self, experts: int) -> range:
        """The slice of this rank.

        Raises:
            ConfigError: The group's size does not divide the experts.
        """
        if experts % self._ranks:
            raise ConfigError(field="ep", value=self._ranks, rule=f"must divide experts ({experts})")
        each = experts // self._ranks
        return range(self._group.rank() * each, (self._group.rank() + 1) * each)

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing: Routing, *, pinned: tuple[Arrival] | None = None
    ) -> tuple[Tensor, Tensor, Arrival]:
        """Send rows and weights to the ranks of their experts; the first pass exchanges the counts before."""
        arrival = self._meet(routing) if pinned is None else pinned[0]
        rows, weights = _Dispatch.apply(tokens, probs, self, arrival.handle)  # type: ignore[no-untyped-call]  # torch's
        return rows, weights, arrival

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Send the gradients back."""
        splits: Splits = pinned[1].handle
        rows, weights = grads[0], grads[1]
        return (
            None if rows is None else self.back(rows, splits, "dispatch tokens"),
            None if weights is None else self.back(weights, splits, "dispatch weights"),
            None,
        )

    def combine(self, rows: Tensor, routing: Routing, arrival: Arrival) -> Tensor:
        """Send expert outputs back."""
        result: Tensor = _Combine.apply(rows, self, arrival.handle)  # type: ignore[no-untyped-call]  # torch's
        return result

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None, None]:
        """Send the gradient to the experts."""
        (rows,) = grads
        return None if rows is None else self.go(rows, pinned[1].handle, "combine rows"), None, None

    def go(self, rows: Tensor, splits: Splits, what: str) -> Tensor:
        """Launch: rows [N, ...] as they were sent -> [M, ...] as they arrive; padding stays."""
        out = rows.new_empty(splits.away, *rows.shape[1:])
        sent = splits.home if splits.sent is None else sum(splits.sent)
        self._launch(out, rows[:sent], splits.received, splits.sent, what)
        return out

    def back(self, rows: Tensor, splits: Splits, what: str) -> Tensor:
        """Launch: rows [M, ...] as they arrived -> [N, ...] as they were sent; zeros for padding."""
        out = rows.new_empty(splits.home, *rows.shape[1:])
        sent = splits.home if splits.sent is None else sum(splits.sent)
        if sent < splits.home:
            out[sent:] = 0
        self._launch(out[:sent], rows, splits.sent, splits.received, what)
        return out

    def _launch(self, out: Tensor, rows: Tensor, received: list[int] | None, sent: list[int] | None, what: str) -> None:
        rows = rows.contiguous()
        self._log.record("all_to_all", what, rows)
        work = dist.all_to_all_single(out, rows, received, sent, group=self._group, async_op=True)
        self._works.add(work, (out, rows))

    def _meet(self, routing: Routing) -> Arrival:
        """Find out what arrives."""
        ranks, home = self._ranks, routing.source.shape[0]
        if routing.capacity is not None:
            held = routing.counts.shape[0] // ranks
            received = routing.counts.new_full((ranks, held), routing.capacity)
            return arrival_of(received, home, Splits(home, home, None, None))
        received = torch.empty_like(routing.counts)
        self._log.record("all_to_all", "counts", received)
        dist.all_to_all_single(received, routing.counts, group=self._group)
        # one copy to the host for both
        sizes = torch.stack((routing.counts, received)).view(2, ranks, -1).sum(-1).tolist()
        away = sum(sizes[1])
        return arrival_of(received.view(ranks, -1), away, Splits(home, away, *sizes))


def arrival_of(received: Tensor, away: int, handle: object) -> Arrival:
    """The arrival of received [R, L] rows, `away` in all: by rank, then expert; experts want expert, then rank."""
    ranks, held = received.shape
    counts = received.sum(0)
    ends = counts.cumsum(0, dtype=torch.int32)
    if ranks == 1 or held == 1:
        return Arrival(counts, ends, handle=handle)
    expert = torch.arange(held, device=received.device).repeat(ranks)
    order = expert.repeat_interleave(received.flatten(), output_size=away).argsort(stable=True)
    places = torch.arange(away, device=received.device)
    return Arrival(counts, ends, True, order, torch.empty_like(order).scatter_(0, order, places), handle)


class _Dispatch(torch.autograd.Function):
    """The way to the experts, differentiable: one node, so that both gradients go back in one order on all ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, transport: AllToAll, splits: Splits) -> tuple[Tensor, Tensor]:
        ctx.transport, ctx.splits = transport, splits
        return transport.go(tokens, splits, "dispatch tokens"), transport.go(probs, splits, "dispatch weights")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights = grads
        tokens = ctx.transport.back(rows, ctx.splits, "dispatch tokens")
        return tokens, ctx.transport.back(weights, ctx.splits, "dispatch weights"), None, None


class _Combine(torch.autograd.Function):
    """The way home, differentiable."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: AllToAll, splits: Splits) -> Tensor:
        ctx.transport, ctx.splits = transport, splits
        return transport.back(rows, splits, "combine rows")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transport.go(grads[0], ctx.splits, "combine rows"), None, None
