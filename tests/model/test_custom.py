"""The door to custom Functions, with a graph and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap.model.custom import apply, apply_many

calls: list[Any] = []


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls.append(ctx)
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None)
        ctx.factor = 2
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x - 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + grads[1]


def test_with_a_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    apply(Twice, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    up, down = apply_many(Both, x)
    assert up.requires_grad
    assert down.requires_grad


def test_without_a_graph_no_context_is_made_and_the_bits_are_the_same() -> None:
    x = torch.randn(3, requires_grad=True)
    expected = apply(Twice, x)
    calls.clear()
    with torch.no_grad():
        found = apply(Twice, x)
        up, down = apply_many(Both, x)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert not isinstance(calls[0], torch.autograd.function.FunctionCtx)
    assert torch.equal(up, x + 1)
    assert torch.equal(down, x - 1)
