"""SwiGLU's elementwise part against the formula; what it keeps for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from overlap.memory.oracle import allocator_peak
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


def run_backward(gate_up: Tensor, probs: Tensor | None, *, consumes: bool, keep: bool = False) -> tuple[Tensor, ...]:
    """SwiGLU's input as backward leaves it, its gradient, and the gradient of the rows' weights."""
    leaves = [gate_up.clone().requires_grad_(), *(() if probs is None else (probs.clone().requires_grad_(),))]
    inner = leaves[0] * 1
    found: list[Tensor] = []
    inner.register_hook(found.append)
    result = swiglu(inner, *leaves[1:], consumes=consumes)
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result).to(result.dtype), retain_graph=keep)
    return inner.detach(), found[0], *(leaf.grad for leaf in leaves[1:] if leaf.grad is not None)


class Kernels:
    """Stand for kernels of our own: they write past torch's count of versions."""

    def swiglu_forward(self, rows: Tensor, probs: Tensor | None, out: Tensor) -> None:
        out.numpy()[:] = by_formula(rows.detach(), None if probs is None else probs.detach()).numpy()

    def swiglu_backward(self, rows: Tensor, probs: Tensor | None, grad: Tensor, out: Tensor, of_probs: Any) -> None:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (rows, probs) if tensor is not None]
        with torch.enable_grad():
            found = torch.autograd.grad(by_formula(leaves[0], None if probs is None else leaves[1]), leaves, grad)
        for target, value in zip((out, of_probs), found, strict=False):
            target.numpy()[:] = value.numpy()


@pytest.fixture(params=["blocks", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 2)
    if request.param == "kernels":
        monkeypatch.setattr(module, "_one_kernel", lambda _: True)
        monkeypatch.setattr(module, "kernels", lambda _: Kernels())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_gradient_goes_over_the_input(way: None, rows: int, weighted: bool) -> None:
    """To the bit what it is in memory of its own, which is where it goes unless the caller allows it."""
    gate_up, probs = torch.randn(rows, 8), torch.rand(rows) if weighted else None
    left, *want = run_backward(gate_up, probs, consumes=False)
    over, *found = run_backward(gate_up, probs, consumes=True)
    assert torch.equal(left, gate_up)
    assert len(found) == len(want) == 1 + weighted
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert over.data_ptr() == found[0].data_ptr()
    assert torch.equal(over, want[0])
    assert not rows or left.data_ptr() != want[0].data_ptr()


def test_any_shape_and_strides(way: None) -> None:
    """A gradient in place of what is not contiguous is a copy's."""
    for gate_up in (torch.randn(2, 3, 8), torch.randn(3, 2, 8).transpose(0, 1), torch.randn(8, 5).t()):
        want, found = (run_backward(gate_up, None, consumes=consumes)[1] for consumes in (False, True))
        assert torch.equal(want, found)


def test_a_graph_that_is_kept_keeps_the_input(way: None) -> None:
    gate_up, probs = torch.randn(5, 8), torch.rand(5)
    left = run_backward(gate_up, probs, consumes=True, keep=True)[0]
    assert torch.equal(left, gate_up)
    leaf = gate_up.clone().requires_grad_()
    result = swiglu(leaf * 1, probs, consumes=True).sum()
    (first,) = torch.autograd.grad(result, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(result, leaf)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.backward()


def test_who_saved_the_input_too_is_told(way: None) -> None:
    """A caller that breaks its promise gets an error of torch's, not other numbers."""
    inner = torch.randn(5, 8, requires_grad=True) * 1
    square = inner * inner
    loss = square.sum() + swiglu(inner, consumes=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_backward_takes_as_much_less_as_its_input_holds(weighted: bool) -> None:
    peaks = []
    for consumes in (False, True):
        leaf, probs = torch.randn(512, 128, requires_grad=True), torch.rand(512, requires_grad=True)
        # What comes before takes nothing.
        result = swiglu(leaf.view(512, 128), probs if weighted else None, consumes=consumes)
        grad = torch.ones_like(result)
        peaks.append(allocator_peak(partial(torch.autograd.backward, result, grad)))
    assert peaks[0] - peaks[1] == 512 * 128 * 4
