"""Routing with a capacity: who is kept, who is dropped, and what zeros stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap.dispatch import make_routing
from overlap.dispatch.arrival import stay
from overlap.model.permute import permute, reorder, unpermute, unpermute_adjoint

IDS = torch.tensor([[0, 2], [0, 1], [0, 2]])


def test_the_first_copies_get_the_rows() -> None:
    """Copies are numbered token*2 + slot. Expert 0 is chosen by copies 0, 2, 4; 1 by 3; 2 by 1, 5."""
    routing = make_routing(IDS, 3, capacity=2)
    assert routing.source.tolist() == [0, 2, 3, 6, 1, 5]
    assert routing.inverse.tolist() == [0, 4, 1, 2, 6, 5]
    assert routing.counts.tolist() == [3, 1, 2]
    assert (routing.covers, routing.capacity, routing.topk) == (True, 2, 2)
    assert routing.token.tolist() == [0, 1, 1, 3, 0, 2]


@pytest.mark.parametrize(("capacity", "counts", "ends"), [(2, [2, 2, 2], [2, 4, 6]), (None, [3, 1, 2], [3, 4, 6])])
def test_experts_see_where_their_rows_end(capacity: int | None, counts: list[int], ends: list[int]) -> None:
    """With a capacity, whatever the choice."""
    routing = make_routing(IDS, 3, capacity=capacity)
    arrival = stay(routing)
    assert arrival.counts.tolist() == counts
    assert routing.ends.tolist() == arrival.ends.tolist() == ends
    assert routing.ends.dtype is arrival.ends.dtype is torch.int32


def test_padding_takes_no_row() -> None:
    routing = make_routing(IDS, 3, torch.tensor([True, False, False]), capacity=2)
    assert routing.source.tolist() == [2, 4, 3, 6, 5, 6]
    assert routing.inverse.tolist() == [6, 6, 0, 2, 1, 4]
    assert routing.counts.tolist() == [2, 1, 1]


@given(
    tokens=st.integers(1, 9),
    experts=st.integers(2, 5),
    capacity=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    padded=st.booleans(),
)
def test_against_a_loop(tokens: int, experts: int, capacity: int, seed: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    padding = torch.rand(tokens, generator=generator) < 0.4 if padded else torch.zeros(tokens, dtype=torch.bool)
    routing = make_routing(ids, experts, padding if padded else None, capacity)
    rows: list[list[int]] = [[] for _ in range(experts)]
    inverse = []
    for copy, expert in enumerate(ids.flatten().tolist()):
        kept = not padding[copy // 2] and len(rows[expert]) < capacity
        inverse.append(expert * capacity + len(rows[expert]) if kept else experts * capacity)
        if kept:
            rows[expert].append(copy)
    assert routing.inverse.tolist() == inverse
    assert routing.source.tolist() == [copy for r in rows for copy in r + [2 * tokens] * (capacity - len(r))]


def test_only_padding_without_a_capacity_leaves_rows_to_nobody() -> None:
    padding = torch.tensor([False, True, False])
    found = {(p is None, k): make_routing(IDS, 3, p, k).covers for p in (None, padding) for k in (None, 2)}
    assert found == {(True, None): True, (True, 2): True, (False, None): False, (False, 2): True}


def test_dropped_copies_and_empty_rows_are_zeros() -> None:
    routing = make_routing(IDS, 3, capacity=2)
    tokens = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    rows, probs = permute(tokens, routing), reorder(weights, routing)
    assert torch.equal(rows[0], tokens[0])
    assert not rows[3].any()
    assert probs[3] == 0
    probs.sum().backward()
    # copy 4 (token 2, slot 0) was dropped: its weight has a gradient of exactly zero
    assert weights.grad is not None
    assert weights.grad.tolist() == [[1, 1], [1, 1], [0, 1]]
    summed = unpermute(rows, routing)
    assert torch.equal(summed[2], tokens[2])
    assert torch.equal(summed[1], tokens[1] + tokens[1])


def test_gradients_with_gaps() -> None:
    routing = make_routing(IDS, 3, capacity=2)
    tokens = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, routing), (tokens,))
    assert torch.autograd.gradcheck(lambda x: unpermute(x, routing), (rows,))
    grad = torch.randn(3, 4, dtype=torch.float64)
    (found,) = torch.autograd.grad(unpermute(rows, routing), rows, grad)
    assert torch.equal(found, unpermute_adjoint(grad, routing))


@pytest.mark.parametrize("capacity", [3, 7])
def test_a_capacity_that_drops_nothing_changes_no_number(capacity: int) -> None:
    tight, free = make_routing(IDS, 3, capacity=capacity), make_routing(IDS, 3)
    tokens = torch.randn(3, 4)
    assert torch.equal(unpermute(permute(tokens, tight), tight), unpermute(permute(tokens, free), free))


def test_more_experts_than_sixteen_bits_count() -> None:
    """Sort keys are 16 bits wide only where expert numbers fit."""
    ids = torch.tensor([[39_999, 5], [32_768, 0], [7, 39_998]])
    routing = make_routing(ids, 40_000)
    assert ids.flatten()[routing.source].tolist() == sorted(ids.flatten().tolist())
