"""Rows reach the ranks of their experts and come back: against one process that holds all experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap.dispatch import make_routing
from overlap.dispatch.all_to_all import AllToAll
from overlap.parallel.collective_log import CollectiveLog
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.works import Works
from overlap.parallel.world import open_world
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.distributed
WIDTH = 3


def choice(rank: int, kind: str, experts: int, size: int) -> Tensor:
    """[T, 2] expert ids; T differs by rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 5 + 2 * rank
    if kind == "first":
        return torch.arange(tokens * 2).view(tokens, 2) % max(experts // size, 2)
    if kind == "none_from_rank_1" and rank == 1:
        return torch.empty(0, 2, dtype=torch.int64)
    return torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])


def round_trip(size: int, experts: int, kind: str, dtype: torch.dtype, capacity: int | None, padded: bool) -> list[str]:
    """Expert e multiplies its rows by e+1: what comes back, forward and backward, is known without communication."""
    log = CollectiveLog()
    world = open_world(ParallelLayout(world_size=size, ep=size))
    transport = AllToAll(world.ep_group, Works(), log)
    ids = choice(world.rank, kind, experts, size)
    padding = torch.arange(ids.shape[0]) % 3 == 1 if padded else None
    routing = make_routing(ids, experts, padding, capacity)
    rows = routing.source.shape[0]
    generator = torch.Generator().manual_seed(50 + world.rank)
    values = torch.randint(1, 9, (rows, WIDTH), generator=generator).to(dtype)
    tokens, probs = values.requires_grad_(), torch.rand(rows, generator=generator).requires_grad_()
    sent, weights, arrival = transport.dispatch(tokens, probs, routing)
    held = transport.held(experts)
    factor = torch.tensor([e + 1 for e in held]).repeat_interleave(arrival.counts)
    if arrival.order is not None:
        assert arrival.inverse is not None
        assert torch.equal(arrival.order[arrival.inverse], torch.arange(sent.shape[0]))
        factor = factor[arrival.inverse]
    assert sent.shape[0] == int(arrival.counts.sum())
    out = transport.combine(sent * factor.view(-1, 1).to(dtype), routing, arrival)

    real = int(routing.counts.sum()) if capacity is None else rows
    expert = ids.flatten()[routing.source] if capacity is None else torch.arange(experts).repeat_interleave(capacity)
    expected = (expert + 1).view(-1, 1).to(dtype) * (torch.arange(rows) < real).view(-1, 1)
    assert torch.equal(out, tokens * expected)
    grad = torch.randint(1, 9, out.shape, generator=generator).to(dtype)
    found, found_probs = torch.autograd.grad((out, weights), (tokens, probs), (grad, weights.detach()))
    assert torch.equal(found, grad * expected)
    assert torch.equal(found_probs[:real], probs[:real])
    assert not found_probs[real:].any()

    there = transport.combine_adjoint((grad,), (routing, arrival))
    assert there[1:] == (None, None)
    assert there[0] is not None
    back = transport.dispatch_adjoint((there[0] * factor.view(-1, 1), None, None), (routing, arrival))
    assert back[0] is not None
    assert torch.equal(back[0].to(dtype), found)
    assert back[1:] == (None, None)
    again = transport.dispatch(tokens, probs, routing, pinned=(arrival,))
    assert again[2] is arrival
    assert torch.equal(again[0], sent)
    return log.entries


@pytest.mark.parametrize(
    ("size", "experts", "kind", "dtype", "capacity", "padded"),
    [
        (2, 4, "random", torch.float32, None, False),
        (2, 4, "random", torch.bfloat16, None, True),
        (2, 2, "random", torch.float64, None, False),
        (2, 4, "first", torch.float32, None, False),
        (2, 4, "none_from_rank_1", torch.float32, None, False),
        (4, 8, "random", torch.float32, None, False),
        (2, 4, "random", torch.float32, 2, False),
        (2, 2, "random", torch.bfloat16, 3, True),
    ],
)
def test_rows_go_to_their_experts_and_back(
    ranks: RankPool, size: int, experts: int, kind: str, dtype: torch.dtype, capacity: int | None, padded: bool
) -> None:
    """Rows 41 and 42: one local expert; no tokens to a rank; no tokens from a rank."""
    logs = ranks(size, round_trip, size, experts, kind, dtype, capacity, padded)
    assert all(log == logs[0] for log in logs)
    # counts once; a replay, which is given the arrival, exchanges none
    assert sum("counts" in entry for entry in logs[0]) == (1 if capacity is None else 0)
