"""Feed-forwards against their formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from overlap.dispatch import make_routing
from overlap.model import GroupedExperts, SwiGLU, init_weights
from overlap.model.permute import permute, reorder, unpermute
from overlap.model.precision import default_dtype


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up).chunk(2, -1)
    return (F.silu(gate) * up) @ down


def test_swiglu() -> None:
    module = SwiGLU(6, 4)
    init_weights(module, 0)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(module(x), swiglu(x, module.gate_up.weight.T, module.down.weight.T))


def test_experts_equal_a_loop_over_tokens() -> None:
    """An expert without tokens, a weighted sum over the others."""
    with default_dtype(torch.float64):
        module = GroupedExperts(4, 6, 5)
    init_weights(module, 0)
    x, probs = torch.randn(3, 6, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    ids = torch.tensor([[3, 0], [0, 1], [1, 3]])
    routing = make_routing(ids, 4)
    rows = module(permute(x, routing), reorder(probs, routing), routing)
    expected = [
        sum(p * swiglu(token, module.gate_up[e], module.down[e]) for p, e in zip(weights, chosen.tolist(), strict=True))
        for token, weights, chosen in zip(x, probs, ids, strict=True)
    ]
    torch.testing.assert_close(unpermute(rows, routing), torch.stack(expected))
    rows.sum().backward()
    assert module.gate_up.grad is not None
    assert module.gate_up.grad[2].eq(0).all()


def test_no_rows_at_all() -> None:
    module = GroupedExperts(2, 6, 5)
    init_weights(module, 0)
    rows = torch.empty(0, 6, requires_grad=True)
    module(rows, torch.empty(0), make_routing(torch.empty(0, 1, dtype=torch.int64), 2)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.eq(0).all()


def test_rows_of_no_expert_are_zero_and_train_nothing() -> None:
    """Row 34's tokens: rows behind the counts belong to padding."""
    module = GroupedExperts(3, 4, 2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    padding = torch.tensor([False, True, False, True])
    routing, alone = make_routing(ids, 3, padding), make_routing(ids[~padding], 3)
    rows = torch.randn(8, 4, requires_grad=True)
    probs = torch.rand(8, requires_grad=True)
    out = module(rows, probs, routing)
    assert torch.equal(out[:4], module(rows[:4], probs[:4], alone))
    assert torch.equal(out[4:], torch.zeros(4, 4))
    out.square().sum().backward()
    assert rows.grad is not None
    assert probs.grad is not None
    assert torch.equal(rows.grad[4:], torch.zeros(4, 4))
    assert torch.equal(probs.grad[4:], torch.zeros(4))


def test_ends_must_cover_the_rows_unless_padding_follows() -> None:
    module = GroupedExperts(2, 4, 2)
    routing = make_routing(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match=r"end at \[1, 2\], for 3 rows"):
        module(torch.randn(3, 4), torch.rand(3), routing)
    with pytest.raises(ValueError, match=r"end at \[1, 2\], for 1 rows"):
        module(torch.randn(1, 4), torch.rand(1), routing._replace(covers=False))
