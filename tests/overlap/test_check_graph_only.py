"""graph_only must leave the graph that forward leaves; what differs is named before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder
from overlap.check import check_stages
from overlap.chunk import ModelChunk
from overlap.errors import ProgramError
from overlap.model import linear
from overlap.model.graph_only import placeholder
from overlap.model.linear import graph_inputs
from tests.overlap.programs import Own

FEEDS = {"x": torch.randn(2, 3)}
Form = Callable[[Any, Tensor, Any], Any]


def chunk_of(forward: Form, graph_only: Form, *, adjoint: Any = None, **declared: Any) -> ModelChunk:
    """A chunk of a linear stage, then one with both forms."""

    def build(module: Any, b: ProgramBuilder) -> None:
        w = b.parameter("shared", module.shared)
        (h,) = b.compute("embed", lambda x: x * module.first, b.input("x"), outputs=("h",), parameters=(module.first,))
        with b.layer(0):
            (y, *_) = b.compute(
                "mine", lambda h, w, **_: forward(module, h, w), h, w, outputs=("y",), parameters=(module.second,),
                graph_only=lambda h, w, **_: graph_only(module, h, w), adjoint=adjoint, **declared,
            )  # fmt: skip
        (loss,) = b.compute("head", lambda y, w: y.square().sum() + w.sum(), y, w, outputs=("loss",))
        b.loss(loss)

    members = {name: nn.Parameter(torch.randn(3)) for name in ("first", "second")}
    return ModelChunk(Own(build, **members, shared=nn.Parameter(torch.randn(4, 3)), seen=torch.zeros(1)))


class Product(torch.autograd.Function):
    """x * y whose product may be left out; `wrong` breaks one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, left_out: bool, wrong: int) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.wrong = wrong
        return placeholder(x, *x.shape) if left_out else x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, y = ctx.saved_tensors
        return grad * y * (2 if ctx.wrong == 1 else 1), (grad * x).sum(0) * (2 if ctx.wrong == 2 else 1), None, None


def product(left_out: bool, wrong: int = 0) -> Form:
    return lambda m, h, w: Product.apply(h, m.second, left_out, wrong) @ w[:3]


def early(left_out: bool, wrong: int = 0) -> Form:
    return lambda m, h, w: Product.apply(h @ w[:3], m.second, left_out, wrong)


def late(left_out: bool, factor: float = 1.0) -> Form:
    return lambda m, h, w: linear(h * factor, w, graph_only=left_out)


@pytest.mark.parametrize(
    ("forward", "graph_only", "declared"),
    [
        (early(False), early(True), {}),
        (late(False), late(True), {"wgrad": True}),
        (lambda m, h, w: (early(False)(m, h, w), 3), lambda m, h, w: (early(True)(m, h, w), 3), {"nondiff": ("n",)}),
        (
            lambda m, h, w: early(False)(m, h, w) + torch.rand(3),
            lambda m, h, w: early(True)(m, h, w) + torch.rand(3),
            {"draws_rng": True},
        ),
    ],
)
def test_the_same_graph_is_accepted(forward: Form, graph_only: Form, declared: dict[str, Any]) -> None:
    chunk = chunk_of(forward, graph_only, **declared)
    state = torch.get_rng_state()
    check_stages(chunk, FEEDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in chunk.parameters())


@pytest.mark.parametrize(
    ("forward", "graph_only", "message"),
    [
        (early, lambda m, h, w: early(True)(m, h, w)[:1], r"'0.y' as \(\(1, 3\), torch.float32.*not \(\(2, 3\)"),
        (early, lambda m, h, w: early(True)(m, h, w).double(), r"'0.y' as \(\(2, 3\), torch.float64"),
        (early, early(True, wrong=1), r"another gradient of 'h'"),
        (early, early(True, wrong=2), "another gradient of a parameter"),
        (early, lambda m, h, w: early(True)(m, h, w.detach()), r"another gradient of 'weight.shared'"),
        (
            early,
            lambda m, h, w: Product.apply(h @ w[:3], m.second.detach(), True, 0),
            "another gradient of a parameter",
        ),
        (early, lambda m, h, w: torch.empty(2, 3), r"another gradient of 'h'"),
        # what was left out stands before another operation, which keeps what it read
        (product, product(True), r"another gradient of 'weight.shared'"),
    ],
)
def test_another_graph_is_named(forward: Callable[[bool], Form], graph_only: Form, message: str) -> None:
    chunk = chunk_of(forward(False), graph_only)
    with pytest.raises(ProgramError, match=rf"stage 0.mine: its graph_only gives {message}"):
        check_stages(chunk, FEEDS)
    assert all(parameter.grad is None for parameter in chunk.parameters())


@pytest.mark.parametrize(
    "graph_only",
    [
        late(True, factor=2.0),
        lambda m, h, w: placeholder(h @ w.t(), 2, 4) + 0 * h.sum(),
        lambda m, h, w: linear(h, w.detach().requires_grad_(), graph_only=True),
    ],
)
def test_another_delayed_gradient_is_named(graph_only: Form) -> None:
    chunk = chunk_of(late(False), graph_only, wgrad=True)
    with pytest.raises(ProgramError, match=r"stage 0.mine: its graph_only gives another"):
        check_stages(chunk, FEEDS)


def test_what_needs_no_graph_declares_none() -> None:
    with pytest.raises(ProgramError, match=r"stage 0.mine has an adjoint and graph_only"):
        _ = chunk_of(early(False), early(True), adjoint=lambda grads, pinned: (None, None)).program


def test_left_out_weights_are_those_of_a_step() -> None:
    """The check itself runs as a step that delays: the weight is outside the graph."""
    seen = []

    def forward(m: Any, h: Tensor, w: Tensor) -> Tensor:
        seen.append(graph_inputs(h, w)[1] is not None)
        return linear(h, w)

    check_stages(chunk_of(forward, late(True), wgrad=True), FEEDS)
    assert seen == [False, True]
