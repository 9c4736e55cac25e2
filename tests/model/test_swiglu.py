"""SwiGLU's elementwise part against the formula; what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from overlap.model import swiglu as module
from overlap.model.swiglu import swiglu


def by_formula(gate_up: Tensor, probs: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    product = F.silu(gate) * up
    return product if probs is None else product * probs.unsqueeze(-1)


@pytest.mark.parametrize("weighted", [False, True])
def test_finite_differences(weighted: bool) -> None:
    gate_up = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(5, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(swiglu, (gate_up, probs))
    torch.testing.assert_close(swiglu(gate_up, probs), by_formula(gate_up, probs))


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_blocks_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, probs = torch.randn(rows, 8).bfloat16(), torch.rand(rows)

    def run() -> list[Tensor]:
        leaves = [gate_up.clone().requires_grad_(), probs.clone().requires_grad_()]
        result = swiglu(*leaves)
        result.backward(torch.ones_like(result))
        return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    whole = run()
    monkeypatch.setattr(module, "_ROWS", 2)
    pieces = run()
    assert len(whole) == len(pieces) == 3
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_only_the_input_is_kept() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    gate_up, probs = torch.randn(4, 8, requires_grad=True), torch.rand(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu(gate_up, probs)
    assert {tensor.data_ptr() for tensor in kept} == {gate_up.data_ptr(), probs.data_ptr()}
