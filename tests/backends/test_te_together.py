"""The product behind SwiGLU in 8 bits, and casts of several experts at once, with a stand-in for the package."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.model.swiglu import swiglu, swiglu_gradients
from tests.backends.te_stand_in import Quantised, install
from tests.backends.test_te_grouped import RECIPES, SPLITS, grid, limit_pieces, run


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


def with_probs(call: Any, weight: nn.Parameter, inner: Tensor, probs: Tensor, how: str) -> tuple[Tensor, ...]:
    """What run() gives, and the gradient of the rows' weights."""
    leaf = probs.clone().requires_grad_()
    return *run(lambda x: call(x * 1, leaf), weight, inner, how), *(() if leaf.grad is None else (leaf.grad,))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(("kind", "multiple", "unused"), [("block", 4, 3), ("current", 1, 0)])
@pytest.mark.parametrize("how", ["now", "late", "in place"])
def test_activated_is_swiglu_and_the_product(engine, kind, multiple, unused, splits, how, monkeypatch):
    _, load = engine
    weight = nn.Parameter(torch.randn(4, 6, 5))
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES[kind], nn.ModuleList(), multiple)
    total = sum(splits)
    inner, probs = torch.zeros(total + unused, 10), torch.rand(total + unused)
    inner[:total] = torch.randn(total, 10)
    want = with_probs(lambda x, p: product(weight, swiglu(x, p), splits), weight, inner, probs, how)
    for matrices, rows in ((1, None), (2, None), (4, None), (4, 8)):
        limit_pieces(monkeypatch, load, weight, matrices, rows)
        found = with_probs(lambda x, p: product.activated(weight, x, p, splits), weight, inner, probs, how)
        assert len(found) == 4
        left_out = with_probs(
            lambda x, p: product.activated(weight, x, p, splits, graph_only=True), weight, inner, probs, how
        )
        assert left_out[0].shape == want[0].shape
        assert left_out[0].untyped_storage().nbytes() == left_out[0][:1, :1].nbytes
        assert all(torch.equal(a, b) for a, b in zip(left_out[1:], want[1:], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    with torch.no_grad():
        assert torch.equal(product.activated(weight, inner, probs, splits), want[0])


@pytest.mark.parametrize("frozen", ["weight", "rows"])
def test_activated_with_something_frozen(engine, frozen):
    _, load = engine
    weight = nn.Parameter(torch.randn(2, 6, 5), requires_grad=frozen != "weight")
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES["block"], nn.ModuleList(), 1)
    probs = torch.rand(7, requires_grad=frozen != "rows")
    found = []
    for call in (
        lambda x: product.activated(weight, x, probs, [3, 4]),
        lambda x: product(weight, swiglu(x, probs), [3, 4]),
    ):
        leaf = torch.linspace(-1, 1, 70).view(7, 10).requires_grad_(frozen != "rows")
        y = call(leaf * 1)
        y.backward(torch.linspace(-2, 2, 42).view(7, 6))
        found.append((y.detach(), *(None if t.grad is None else t.grad.clone() for t in (leaf, probs, weight))))
        for tensor in (probs, weight):
            tensor.grad = None
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_the_gradient_takes_the_place_of_the_input(engine):
    """Unless the graph is kept, which then gives the same again."""
    _, load = engine
    weight = nn.Parameter(torch.randn(2, 6, 5))
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES["block"], nn.ModuleList(), 1)
    inner = torch.randn(7, 10, requires_grad=True) * 1
    places: list[int] = []
    inner.register_hook(lambda grad: places.append(grad.data_ptr()))
    y = product.activated(weight, inner, torch.rand(7), [3, 4])
    y.sum().backward(retain_graph=True)
    assert weight.grad is not None
    first = weight.grad.clone()
    assert places != [inner.data_ptr()]
    y.sum().backward()
    assert torch.equal(weight.grad, first + first)
    assert places[1:] == [inner.data_ptr()]


@pytest.mark.parametrize("kind", ["block", "current"])
def test_a_gradient_in_8_bits_lives_as_long_as_it_is_read(engine, kind, monkeypatch):
    """Beside weights there are only its rows, beside the input gradient that is taken there is nothing."""
    _, load = engine
    weight = nn.Parameter(torch.randn(4, 6, 5))
    limit_pieces(monkeypatch, load, weight, 2, None)
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES[kind], nn.ModuleList(), 4)
    beside_weights: list[tuple[bool, bool]] = []
    taken: list[int] = []
    cast_weights = load("te_backward").cast_weights

    def cast(*args: Any, **settings: Any) -> Any:
        if settings["columns"]:
            beside_weights.extend((one.rows is None, one.columns is None) for one in Quantised.alive)
        return cast_weights(*args, **settings)

    def take(*args: Any) -> Any:
        taken.append(len(Quantised.alive))
        return swiglu_gradients(*args)

    monkeypatch.setattr(load("te_backward"), "cast_weights", cast)
    monkeypatch.setattr(load("te_grouped"), "swiglu_gradients", take)
    gc.collect()
    Quantised.alive.clear()
    probs = torch.rand(14)
    run(lambda x: product.activated(weight, x * 1, probs, [3, 4, 2, 5]), weight, torch.randn(14, 10), "in place")
    assert beside_weights == [(False, True)] * 2 * 2
    assert taken == [0, 0]


def test_who_saved_the_input_too_is_told(engine, monkeypatch):
    """Though kernels write past torch's count of versions."""
    _, load = engine
    monkeypatch.setattr(load("te_grouped"), "swiglu_gradients", lambda *args: (args[-1].data.zero_(), None))
    weight = nn.Parameter(torch.randn(2, 6, 5))
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES["block"], nn.ModuleList(), 1)
    inner = torch.randn(7, 10, requires_grad=True) * 1
    square = inner * inner
    loss = square.sum() + product.activated(weight, inner, torch.rand(7), [3, 4]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", ["block", "current"])
def test_experts_are_cast_together(engine, kind):
    """By one call each for weights and rows where scales are of blocks; an idle expert's columns are not made."""
    tex, load = engine
    splits, weight = [4, 0, 8, 4], nn.Parameter(torch.randn(4, 256, 130))
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES[kind], nn.ModuleList(), 4)
    x = torch.randn(16, 130)
    want = torch.cat([grid(r, 4) @ grid(w, 4).t() for r, w in zip(x.split(splits), weight, strict=True)])
    with torch.no_grad():
        y = product(weight, x, splits)
    assert torch.equal(y, want)
    assert tex.casts == (2 if kind == "block" else 3 + 4)
    steps = 4 if kind == "block" else 8
    tex.casts = 0
    _, grad_x, gradient = run(lambda leaf: product(weight, leaf, splits), weight, x, "now")
    seed = torch.linspace(-2, 2, want.numel()).view_as(want)
    parts = seed.split(splits)
    assert torch.equal(grad_x, torch.cat([grid(g, 4) @ grid(w, steps) for g, w in zip(parts, weight, strict=True)]))
    wanted = torch.stack([grid(g, 8).t() @ grid(r, 8) for g, r in zip(parts, x.split(splits), strict=True)])
    assert torch.equal(gradient, wanted)
    assert tex.casts == (3 + 1 + 3 + 1 if kind == "block" else 3 + 4 + 3 + 4)
