"""linear() and grouped_linear(): right gradients, now or later with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap.model import Linear, grouped_linear, linear
from overlap.model.linear import LinearPair
from recompute.wgrad import WeightGradients, collect_weight_gradients

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
COUNTS = [[3, 0, 2, 1], [0, 0, 0, 6], [6, 0, 0, 0], [0, 0, 0, 0]]


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_linear_gradients() -> None:
    assert torch.autograd.gradcheck(linear, (leaf(2, 3, 5), leaf(4, 5)))


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gradients(counts: list[int]) -> None:
    x, weight = leaf(sum(counts), 3), leaf(4, 3, 2)
    assert torch.autograd.gradcheck(grouped_linear, (x, weight, ends_of(counts)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_torch(dtype: torch.dtype) -> None:
    x, weight = leaf(2, 3, 8, dtype=dtype), leaf(4, 8, dtype=dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_equals_a_loop(dtype: torch.dtype, counts: list[int]) -> None:
    # rows of whole 16 bytes: a float32 product rounds otherwise when its result starts elsewhere
    x, weight = leaf(sum(counts), 8, dtype=dtype), leaf(4, 8, 8, dtype=dtype)
    loop = torch.cat([rows @ weight[e] for e, rows in enumerate(x.split(counts))])
    assert torch.equal(grouped_linear(x, weight, ends_of(counts)), loop)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_without_tokens_gets_exact_zeros(dtype: torch.dtype) -> None:
    """Row 42: an expert without tokens keeps a gradient, of zeros."""
    x, weight = leaf(3, 8, dtype=dtype), leaf(3, 8, 4, dtype=dtype)
    grouped_linear(x, weight, ends_of([2, 0, 1])).sum().backward()
    assert weight.grad is not None
    assert weight.grad[1].eq(0).all()
    assert weight.grad[0].ne(0).any()
    assert weight.grad[2].ne(0).any()


@pytest.mark.parametrize("ends", [[1, 3], [1, 5], [5, 4]])
def test_ends_must_rise_and_cover_the_rows(ends: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"end at \[{ends[0]}, {ends[1]}\], for 4 rows"):
        grouped_linear(torch.randn(4, 2), torch.randn(2, 2, 2), torch.tensor(ends, dtype=torch.int32))


def run(weight: Tensor, x: Tensor, ends: Tensor | None) -> Tensor:
    return linear(x, weight) if ends is None else grouped_linear(x, weight, ends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_later_has_the_bits_of_now(dtype: torch.dtype, grouped: bool) -> None:
    ends = ends_of([3, 0, 3]) if grouped else None
    weight = leaf(3, 8, 8, dtype=dtype) if grouped else leaf(8, 8, dtype=dtype)
    x = leaf(6, 8, dtype=dtype)
    out = run(weight, x, ends)
    grad = torch.randn_like(out)
    now_x, now_weight = torch.autograd.grad(out, (x, weight), grad)
    collector = WeightGradients()
    out = run(weight, x, ends)
    with collect_weight_gradients(collector):
        out.backward(grad)
    assert weight.grad is None
    assert x.grad is not None
    assert torch.equal(x.grad, now_x)
    ((found, later),) = collector.drain()
    assert found is weight
    assert torch.equal(later, now_weight)


@pytest.mark.parametrize("grouped", [False, True])
def test_frozen_weight_keeps_no_activation(grouped: bool) -> None:
    ends = ends_of([6]) if grouped else None
    weight = torch.randn(1, 4, 4) if grouped else torch.randn(4, 4)
    x = leaf(6, 4, dtype=torch.float32)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(weight, x, ends)
    assert all(tensor.data_ptr() != x.data_ptr() for tensor in saved)
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        out.sum().backward()
    assert x.grad is not None
    assert collector.pending == []


def test_computed_weight_gets_its_gradient_now() -> None:
    """Row 20: a base weight plus its adapter has its own backward, which a put-off gradient would miss."""
    base, adapter = torch.randn(4, 4), leaf(4, 4, dtype=torch.float32)
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        linear(torch.randn(2, 4), base + adapter).sum().backward()
    assert collector.pending == []
    assert adapter.grad is not None


def test_put_off_gradient_finds_its_weight_under_saved_tensor_hooks() -> None:
    """Row 72: hooks that hand back copies must not hide the weight."""
    layer = Linear(4, 4)
    torch.nn.init.ones_(layer.weight)
    collector = WeightGradients()
    with torch.autograd.graph.save_on_cpu():
        out = layer(torch.randn(2, 4))
    with collect_weight_gradients(collector):
        out.sum().backward()
    ((found, _),) = collector.drain()
    assert found is layer.weight


@pytest.mark.parametrize("grouped", [False, True])
def test_autocast_computes_narrow_and_returns_gradients_wide(grouped: bool) -> None:
    """Row 8: forward inside autocast, backward outside it."""
    ends = ends_of([6]) if grouped else None
    weight = leaf(1, 8, 8, dtype=torch.float32) if grouped else leaf(8, 8, dtype=torch.float32)
    x = leaf(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(weight, x, ends)
    assert out.dtype is torch.bfloat16
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert collector.drain()[0][1].dtype is torch.float32


def test_a_pair_is_one_after_the_other() -> None:
    order: list[str] = []
    layers = [Linear(4, outer) for outer in (3, 5)]
    for name, layer in zip(("first", "second"), layers, strict=True):
        torch.nn.init.normal_(layer.weight)
        layer.register_forward_hook(lambda *_, name=name: order.append(name))
    x = torch.randn(2, 4)
    found = LinearPair()(*layers, x)
    assert order == ["first", "second"]
    assert all(torch.equal(y, linear(x, layer.weight)) for y, layer in zip(found, layers, strict=True))
