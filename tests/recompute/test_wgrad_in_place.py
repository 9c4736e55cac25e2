"""Weight gradients that are added to `.grad` piece by piece: when, in what order, and when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recompute.wgrad import (
    WeightGradients,
    adding_in_place,
    collect_weight_gradients,
    late_weight_gradient,
    weight_gradient,
)


class Pieces:
    """A weight's gradient, whole or in pieces; counts which was asked for."""

    def __init__(self) -> None:
        self.whole = 0
        self.added = 0

    def compute(self, gradient: Tensor) -> Tensor:
        self.whole += 1
        return gradient.clone()

    def add(self, into: Tensor, gradient: Tensor) -> None:
        self.added += 1
        into += gradient


def weight_with(grad: Tensor | None) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = grad
    return weight


def test_added_where_allowed() -> None:
    pieces, weight = Pieces(), weight_with(torch.ones(3))
    with adding_in_place():
        assert weight_gradient(weight, pieces.compute, torch.full((3,), 2.0), add=pieces.add) is None
    assert (pieces.whole, pieces.added) == (0, 1)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 3


def test_whole_outside() -> None:
    """`torch.autograd.grad` must find a gradient."""
    pieces, weight = Pieces(), weight_with(torch.ones(3))
    assert weight_gradient(weight, pieces.compute, torch.ones(3), add=pieces.add) is not None
    assert pieces.added == 0


def test_whole_without_a_grad() -> None:
    pieces, weight = Pieces(), weight_with(None)
    with adding_in_place():
        assert weight_gradient(weight, pieces.compute, torch.ones(3), add=pieces.add) is not None


def test_whole_if_it_cannot_be_added() -> None:
    pieces, weight = Pieces(), weight_with(torch.ones(3))
    with adding_in_place():
        assert weight_gradient(weight, pieces.compute, torch.ones(3)) is not None


@pytest.mark.parametrize("register", [nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook])
def test_whole_where_a_hook_waits_for_it(register: Callable[..., Any]) -> None:
    """Row 55: hooks see the gradient, once."""
    pieces, weight = Pieces(), weight_with(torch.ones(3))
    register(weight, lambda tensor: None)
    with adding_in_place():
        assert weight_gradient(weight, pieces.compute, torch.ones(3), add=pieces.add) is not None
    assert pieces.added == 0


def test_a_frozen_weight_is_left_alone() -> None:
    pieces, weight = Pieces(), weight_with(torch.ones(3))
    weight.requires_grad_(False)
    with adding_in_place():
        assert weight_gradient(weight, pieces.compute, torch.ones(3), add=pieces.add) is None
    assert (pieces.whole, pieces.added) == (0, 0)


@pytest.mark.parametrize("late", [False, True])
def test_put_off_gradients_are_added_when_drained(late: bool) -> None:
    pieces, weight, other = Pieces(), weight_with(torch.ones(3)), weight_with(None)
    collector = WeightGradients()
    with adding_in_place():
        with collect_weight_gradients(collector):
            for value in (1.0, 2.0):
                put_off = late_weight_gradient if late else weight_gradient
                put_off(weight, pieces.compute, torch.full((3,), value), add=pieces.add)
            weight_gradient(other, pieces.compute, torch.ones(3), add=pieces.add)
        assert pieces.added == 0
        assert [owner is other for owner, _ in collector.drain()] == [True]
    assert (pieces.whole, pieces.added) == (1, 2)
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 3


def test_uses_of_which_one_cannot_be_added_are_summed() -> None:
    pieces, weight, collector = Pieces(), weight_with(torch.ones(3)), WeightGradients()
    with adding_in_place():
        with collect_weight_gradients(collector):
            weight_gradient(weight, pieces.compute, torch.full((3,), 2.0), add=pieces.add)
            weight_gradient(weight, pieces.compute, torch.full((3,), 3.0))
        ((owner, gradient),) = collector.drain()
    assert owner is weight
    assert gradient.tolist() == [5.0] * 3
    assert (pieces.whole, pieces.added) == (2, 0)


def test_two_uses_round_as_they_do_at_once() -> None:
    """One after the other into `.grad`, in the order of use: now and later give the same bits."""
    big, small = torch.tensor([1.0]), torch.tensor([2.0**-24])
    grads = []
    for collected in (False, True):
        pieces, weight, collector = Pieces(), nn.Parameter(torch.zeros(1)), WeightGradients()
        weight.grad = big.clone()
        with adding_in_place():
            if collected:
                with collect_weight_gradients(collector):
                    for _ in range(2):
                        weight_gradient(weight, pieces.compute, small, add=pieces.add)
                assert collector.drain() == []
            else:
                for _ in range(2):
                    weight_gradient(weight, pieces.compute, small, add=pieces.add)
        grads.append(weight.grad)
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], big + (small + small)), "the sum of both would have counted"


def test_the_setting_ends_with_its_block() -> None:
    pieces, weight = Pieces(), weight_with(torch.ones(3))
    with pytest.raises(ValueError, match="inside"), adding_in_place():
        raise ValueError("inside")
    assert weight_gradient(weight, pieces.compute, torch.ones(3), add=pieces.add) is not None
