"""Weight gradients that are put off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recompute import RecomputeError
from recompute.wgrad import (
    WeightGradients,
    collect_weight_gradients,
    is_left_out,
    late_weight_gradient,
    weight_gradient,
    weights_left_out,
)


def outer(x: Tensor, grad: Tensor) -> Tensor:
    return grad.t() @ x


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, weight_gradient(weight, outer, x, grads[0])


def product(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Product.apply(x, weight)
    return result


def fail(*_: object) -> None:
    raise ValueError("inside")


def test_without_a_collector_it_is_computed_now() -> None:
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4)
    product(x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, outer(x, torch.ones(2, 3)))


def test_with_a_collector_it_waits_and_has_the_same_bits() -> None:
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4, requires_grad=True)
    product(x, weight).square().sum().backward()
    expected, weight.grad = weight.grad, None
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        product(x, weight).square().sum().backward()
    assert weight.grad is None
    assert [item.weight is weight for item in collector.pending] == [True]
    ((owner, gradient),) = collector.drain()
    assert owner is weight
    assert expected is not None
    assert torch.equal(gradient, expected)
    assert collector.pending == []
    assert collector.drain() == []


@pytest.mark.parametrize("parameter", [True, False])
def test_a_weight_behind_saved_tensor_hooks_is_the_weight(parameter: bool) -> None:
    """Hooks give backward another object: its uses would not be summed, nor would anyone know it."""
    value = torch.randn(4, 4)
    weight = nn.Parameter(value) if parameter else value.requires_grad_()
    x = torch.randn(2, 4, requires_grad=True)
    product(product(x, weight), weight).sum().backward()
    expected, weight.grad = weight.grad, None
    collector = WeightGradients()
    with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        result = product(product(x, weight), weight).sum()
    with collect_weight_gradients(collector):
        result.backward()
    assert [item.weight is weight for item in collector.pending] == [True, True]
    ((_, gradient),) = collector.drain()
    assert expected is not None
    assert torch.equal(gradient, expected)


def test_what_waits_keeps_no_graph_alive() -> None:
    """A saved input comes back with its graph, and that would keep the inputs of the stage."""
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4, requires_grad=True)
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        product(x * 2, weight).square().sum().backward()
    (item,) = collector.pending
    assert [tensor.grad_fn for tensor in item.tensors] == [None, None]


def test_nothing_is_computed_before_it_is_drained() -> None:
    collector, calls = WeightGradients(), []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        assert not torch.is_grad_enabled()
        return x

    with collect_weight_gradients(collector):
        assert weight_gradient(nn.Parameter(torch.ones(1)), compute, torch.ones(1)) is None
    assert calls == []
    collector.drain()
    assert len(calls) == 1


def test_a_weight_used_twice_is_summed_in_the_order_of_backward() -> None:
    """Three uses in float32: another order gives other bits."""
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        for part in parts:
            weight_gradient(weight, torch.clone, part)
        weight_gradient(other, torch.clone, torch.tensor([5.0]))
    (first, total), (second, single) = collector.drain()
    assert first is weight
    assert second is other
    assert torch.equal(total, parts[0] + parts[1] + parts[2])
    assert not torch.equal(total, parts[0] + parts[2] + parts[1])
    assert single.item() == 5.0


def test_collectors_nest_and_close_on_exceptions() -> None:
    outside, inside = WeightGradients(), WeightGradients()
    with collect_weight_gradients(outside):
        with pytest.raises(ValueError, match="inside"), collect_weight_gradients(inside):
            fail(weight_gradient(nn.Parameter(torch.ones(1)), torch.clone, torch.ones(1)))
        weight_gradient(nn.Parameter(torch.ones(1)), torch.clone, torch.ones(1))
    assert (len(outside.pending), len(inside.pending)) == (1, 1)
    assert weight_gradient(nn.Parameter(torch.ones(1)), torch.clone, torch.ones(1)) is not None


def test_a_computed_gradient_does_not_touch_the_first_one() -> None:
    """The sum is a new tensor: `compute` may return a tensor that somebody else owns."""
    weight, owned = nn.Parameter(torch.ones(1)), torch.tensor([2.0])
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        weight_gradient(weight, lambda: owned)
        weight_gradient(weight, lambda: owned)
    assert collector.drain()[0][1].item() == 4.0
    assert owned.item() == 2.0


def test_which_weights_are_left_out() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    assert not is_left_out(weight)
    with weights_left_out():
        assert is_left_out(weight)
        assert not is_left_out(frozen)
        assert not is_left_out(weight * 2), "a weight computed in the stage has its own backward waiting for it"
        with torch.no_grad():
            assert not is_left_out(weight)
        with weights_left_out():
            pass
        assert is_left_out(weight)
    assert not is_left_out(weight)
    with pytest.raises(ValueError, match="inside"), weights_left_out():
        raise ValueError("inside")
    assert not is_left_out(weight)


def test_a_late_gradient_that_nobody_collects_is_an_error() -> None:
    with pytest.raises(RecomputeError, match="collects none"):
        late_weight_gradient(torch.ones(1), torch.clone, torch.ones(1))
    collector = WeightGradients()
    with collect_weight_gradients(collector):
        late_weight_gradient(torch.ones(1), torch.clone, torch.ones(1))
    assert len(collector.pending) == 1
