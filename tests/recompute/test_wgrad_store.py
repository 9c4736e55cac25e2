"""Weight gradients of an external module that has a queue of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from recompute import RecomputeError
from recompute.wgrad import WeightGradients, adding_in_place, collect_weight_gradients, weights_left_out
from recompute.wgrad_store import NO_STORE, GradientStore, Job, NoStore, stand_ins


class _External(torch.autograd.Function):
    """x times the sum of the matrices; hands its weight gradient to the store, as such modules do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.store, ctx.wanted = store, weights[0].requires_grad
        return sum((x @ weight.t() for weight in weights), x.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        x, *weights = ctx.saved_tensors

        def function(x: Tensor, grad: Tensor) -> list[Tensor]:
            return [grad.t() @ x for _ in weights]

        own: list[Tensor | None] = [None] * len(weights)
        if ctx.wanted and ctx.store.delay_wgrad_compute():
            ctx.store.put([x, grad], function)
        elif ctx.wanted:
            own = list(function(x, grad))
        return (sum(grad @ weight for weight in weights), None, *own)


def pack(objects: Sequence[Any], function: Callable[..., Any]) -> Job:
    def add(into: Tensor, x: Tensor, grad: Tensor) -> None:
        into += torch.stack(function(x, grad))

    return Job(lambda x, grad: torch.stack(function(x, grad)), tuple(objects), add)


def call(weight: Tensor, x: Tensor) -> Tensor:
    seen, store = stand_ins(weight, pack, split=True)
    result: Tensor = _External.apply(x, store, *seen)
    return result


def make(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, 5, generator=generator, requires_grad=True)
    return weight, torch.randn(2, 5, generator=generator, requires_grad=True)


def plain(weight: Tensor, x: Tensor) -> Tensor:
    twin = weight.detach().clone().requires_grad_()
    sum(x.detach() @ matrix.t() for matrix in twin.unbind(0)).square().sum().backward()  # type: ignore[union-attr]
    assert twin.grad is not None
    return twin.grad


def test_computed_in_backward_and_hooks_fire_once():
    """Row 55: gradients of two calls add up, and the weight's hook sees each when it is there."""
    weight, x = make()
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        call(weight, x).square().sum().backward()
    want = plain(weight, x)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], want)
    assert torch.equal(seen[1], seen[0] + seen[0])
    assert x.grad is not None


def test_put_off_until_the_weights_slot():
    weight, x = make()
    fired: list[object] = []
    weight.register_hook(fired.append)
    with weights_left_out():
        output = call(weight, x)
    pending = WeightGradients()
    with collect_weight_gradients(pending):
        output.square().sum().backward()
    assert weight.grad is None
    assert fired == []
    ((found, gradient),) = pending.drain()
    assert found is weight
    torch.testing.assert_close(gradient, plain(weight, x))


def test_an_input_that_needs_no_gradient():
    weight, x = make()
    pending = WeightGradients()
    with weights_left_out():
        output = call(weight, x.detach())
    with collect_weight_gradients(pending):
        output.square().sum().backward()
    assert len(pending.drain()) == 1


def test_slots_may_drain_in_any_order():
    """Row 56 and R13: microbatches in flight drain last in, first out; a queue of the module would mix them up."""
    weight, _ = make()
    inputs = [make(seed)[1] for seed in range(3)]
    pending = [WeightGradients() for _ in inputs]
    outputs = []
    for x in inputs:
        with weights_left_out():
            outputs.append(call(weight, x))
    fifo: deque[Tensor] = deque()
    for x, output, collector in zip(inputs, outputs, pending, strict=True):
        fifo.append(plain(weight, x))
        with collect_weight_gradients(collector):
            output.square().sum().backward()
    for number in (2, 0, 1):
        ((_, gradient),) = pending[number].drain()
        torch.testing.assert_close(gradient, plain(weight, inputs[number]))
        assert not torch.allclose(gradient, fifo.popleft()), "control: a queue gives another microbatch's"


def test_added_in_place():
    weight, x = make()
    weight.grad = torch.ones_like(weight)
    before = weight.grad
    with adding_in_place():
        call(weight, x).square().sum().backward()
    assert weight.grad is before
    assert torch.equal(weight.grad, torch.ones_like(weight) + _alone(weight, x))


def _alone(weight: Tensor, x: Tensor) -> Tensor:
    twin = weight.detach().clone().requires_grad_()
    call(twin, x).square().sum().backward()
    assert twin.grad is not None
    return twin.grad


def test_a_weight_computed_in_the_stage():
    """A base weight plus an adapter: its gradient flows on in the same backward, also inside a collecting one."""
    base, x = make()
    pending = WeightGradients()
    with weights_left_out():
        output = call(base * 2, x)
    with collect_weight_gradients(pending):
        output.square().sum().backward()
    assert pending.drain() == []
    torch.testing.assert_close(base.grad, 2 * plain(base * 2, x))


@pytest.mark.parametrize("frozen", [False, True])
def test_no_store_where_no_gradient_is_wanted(frozen):
    weight, _ = make()
    weight.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        seen, store = stand_ins(weight, pack)
    assert store is NO_STORE
    assert isinstance(store, NoStore)
    assert not store.delay_wgrad_compute()
    assert seen[0].data_ptr() == weight.data_ptr()
    assert not seen[0].requires_grad


def test_a_gradient_past_the_store_is_an_error():
    weight, x = make()
    seen, _ = stand_ins(weight, pack, split=True)
    with pytest.raises(RecomputeError, match="past its store"):
        _External.apply(x, NO_STORE, *seen).sum().backward()


def test_two_gradients_in_one_call_are_an_error():
    weight, x = make()
    _, store = stand_ins(weight, pack, split=True)
    assert isinstance(store, GradientStore)
    for _ in range(2):
        store.put([x.detach(), torch.ones(2, 4)], lambda x, grad: [grad.t() @ x] * 3)
    with pytest.raises(RecomputeError, match="more than one"):
        store.take()
