"""Router logits: float32 products of narrow tensors, whose graph keeps no wide copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap.model.logits import wide_logits


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_gradients() -> None:
    assert torch.autograd.gradcheck(wide_logits, (leaf(5, 4, dtype=torch.float64), leaf(3, 4, dtype=torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_bits_of_a_product_of_casts(dtype: torch.dtype, autocast: bool) -> None:
    x, weight = leaf(7, 16, dtype=dtype), leaf(4, 16, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = wide_logits(x, weight)
    expected = torch.nn.functional.linear(x.to(wide), weight.to(wide))
    assert found.dtype is wide
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    grads = [torch.autograd.grad(out, (x, weight), grad) for out in (found, expected)]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert [one.dtype for one in grads[0]] == [dtype, dtype]


@pytest.mark.parametrize(("trains", "kept"), [((True, True), [0, 1]), ((True, False), [1]), ((False, True), [0])])
def test_keeps_what_backward_needs_and_nothing_wide(trains: tuple[bool, bool], kept: list[int]) -> None:
    leaves = (leaf(7, 16, dtype=torch.bfloat16), leaf(4, 16, dtype=torch.bfloat16))
    for one, train in zip(leaves, trains, strict=True):
        one.requires_grad_(train)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = wide_logits(*leaves)
    out.sum().backward()
    assert saved == [leaves[place].data_ptr() for place in kept]
    assert [one.grad is not None for one in leaves] == list(trains)
