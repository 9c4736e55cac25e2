"""Permutation by Transformer Engine's kernels on the pinned routing, with a stand-in that reads their table."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.dispatch import Routing, make_routing
from overlap.model.permute import Permutation
from tests.backends.te_stand_in import put_in, stand_in

TOKENS, EXPERTS, WIDTH = 6, 5, 4


class Kernels:
    """What the kernels read and write, token by token; rows that no token writes hold no numbers."""

    def __init__(self) -> None:
        self.runs = 0

    def permute_with_mask_map(
        self, inp: Tensor, row_id_map: Tensor, probs: None, scale: None, pad_offsets: None, num_tokens: int,
        num_experts: int, num_out_tokens: int, hidden_size: int, scale_hidden_dim: None,
    ) -> tuple[Tensor, None, None]:  # fmt: skip
        assert inp.shape == (num_tokens, hidden_size)
        out = torch.full((num_out_tokens, hidden_size), torch.nan, dtype=inp.dtype)
        for token, rows in enumerate(self.rows(row_id_map, num_tokens, num_experts)):
            out[rows] = inp[token]
        return out, None, None

    def unpermute_with_mask_map(
        self, inp: Tensor, row_id_map: Tensor, merging_probs: None, permuted_probs: None, pad_offsets: None,
        num_tokens: int, num_experts: int, hidden_size: int,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert inp.shape[1] == hidden_size
        return torch.stack([inp[rows].sum(0) for rows in self.rows(row_id_map, num_tokens, num_experts)]), None

    def rows(self, row_id_map: Tensor, tokens: int, experts: int) -> list[list[int]]:
        self.runs += 1
        assert row_id_map.shape == (tokens, 2 * experts + 1)
        assert row_id_map.dtype == torch.int32
        return [line[: line[2 * experts]] for line in row_id_map.tolist()]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    packages = {
        "transformer_engine": stand_in(),
        "transformer_engine.pytorch": stand_in(),
        "transformer_engine.pytorch.triton": stand_in(permutation=made),
    }
    put_in(monkeypatch, packages, ["te_permute"])
    return made


def routing_of(topk: int, padding: bool, capacity: int | None) -> Routing:
    generator = torch.Generator().manual_seed(topk)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:topk] for _ in range(TOKENS)])
    return make_routing(ids, EXPERTS, torch.arange(TOKENS) % 3 == 1 if padding else None, capacity)


def everything(permutation: Permutation, routing: Routing) -> list[Tensor]:
    """Results and gradients of both directions, and the adjoint."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    rows = torch.randn(len(routing.source), WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    there, back = permutation.permute(tokens, routing), permutation.unpermute(rows, routing)
    return [
        there.detach(), back.detach(), permutation.unpermute_adjoint(tokens.detach(), routing),
        *torch.autograd.grad(there, tokens, rows.detach()), *torch.autograd.grad(back, rows, tokens.detach()),
    ]  # fmt: skip


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("topk", [1, 2, 5])
def test_rows_lie_where_the_pinned_routing_says(kernels, topk, padding):
    routing = routing_of(topk, padding, None)
    made: Any = import_module("overlap.backends.te_permute").TEPermutation()
    for found, want in zip(everything(made, routing), everything(Permutation(), routing), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-15, atol=1e-15)
    assert kernels.runs == 5


def test_with_a_capacity_the_models_own(kernels):
    """Rows without a copy would hold no numbers."""
    routing = routing_of(2, False, 2)
    made: Any = import_module("overlap.backends.te_permute").TEPermutation()
    for found, want in zip(everything(made, routing), everything(Permutation(), routing), strict=True):
        assert torch.equal(found, want)
    assert kernels.runs == 0
