"""Token copies into expert order and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap.dispatch import Routing, make_routing
from overlap.model.permute import permute, reorder, unpermute, unpermute_adjoint

EXPERTS = 5


def routing_of(tokens: int, topk: int) -> Routing:
    ids = torch.stack([torch.randperm(EXPERTS)[:topk] for _ in range(tokens)])
    return make_routing(ids, EXPERTS)


@pytest.mark.parametrize("topk", [1, 2, 5])
def test_routing_sorts_by_expert_and_counts(topk: int) -> None:
    routing = routing_of(7, topk)
    flat = routing.expert_ids.flatten()
    assert flat[routing.source].tolist() == sorted(flat.tolist())
    assert torch.equal(routing.source[routing.inverse], torch.arange(7 * topk))
    assert routing.counts.tolist() == [flat.tolist().count(e) for e in range(EXPERTS)]
    assert torch.equal(routing.token, routing.source // topk)
    assert torch.equal(routing.ends, routing.counts.cumsum(0))
    narrow, wide = (routing.source, routing.token, routing.inverse, routing.ends), (flat, routing.counts)
    assert [t.dtype for t in (*narrow, *wide)] == [torch.int32] * 4 + [torch.int64] * 2
    assert routing.covers


def test_rows_of_an_expert_stay_in_token_order() -> None:
    assert make_routing(torch.tensor([[1, 0], [0, 1], [1, 2]]), 3).source.tolist() == [1, 2, 0, 3, 4, 5]


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_gradients(topk: int) -> None:
    routing = routing_of(4, topk)
    tokens = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(4 * topk, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, topk, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, routing), (tokens,))
    assert torch.autograd.gradcheck(lambda x: unpermute(x, routing), (rows,))
    assert torch.autograd.gradcheck(lambda x: reorder(x, routing), (weights,))


def test_permute_places_each_copy() -> None:
    routing = routing_of(6, 2)
    tokens = torch.randn(6, 3)
    weights = torch.randn(6, 2)
    rows = permute(tokens, routing)
    for row, copy in enumerate(routing.source.tolist()):
        assert torch.equal(rows[row], tokens[copy // 2])
        assert torch.equal(reorder(weights, routing)[row], weights[copy // 2, copy % 2])
    assert torch.equal(unpermute(rows, routing), tokens + tokens)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def test_negative_zero_survives() -> None:
    routing = routing_of(3, 1)
    zero = torch.full((3, 2), -0.0, requires_grad=True)
    permute(zero, routing).backward(torch.full((3, 2), -0.0))
    assert zero.grad is not None
    assert torch.equal(bits(zero.grad), bits(torch.full((3, 2), -0.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adjoint_is_the_backward(dtype: torch.dtype) -> None:
    routing = routing_of(6, 3)
    rows = torch.randn(18, 4, dtype=dtype, requires_grad=True)
    grad = torch.randn(6, 4, dtype=dtype)
    unpermute(rows, routing).backward(grad)
    assert rows.grad is not None
    assert torch.equal(rows.grad, unpermute_adjoint(grad, routing))
