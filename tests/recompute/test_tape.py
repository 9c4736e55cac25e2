"""Tape: one island of autograd: detached in and out, edges instead of outputs, backward on demand."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recompute.tape import Tape


def record(forward: Any, inputs: list[Any], tracked: list[bool], differentiable: list[bool]) -> tuple[Tape, Any]:
    return Tape.record(forward, inputs, tracked, differentiable, {})


def test_gradients_equal_plain_autograd() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    x, y, seed = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)

    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a @ weight) * b

    leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
    forward(*leaves).backward(seed)
    expected, weight.grad = weight.grad, None
    tape, (output,) = record(forward, [x, y], [True, True], [True])
    tape.backward([seed])
    found = tape.take_gradients([True, True])
    assert expected is not None
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    for leaf, gradient in zip(leaves, found, strict=True):
        assert leaf.grad is not None
        assert gradient is not None
        assert torch.equal(gradient, leaf.grad)
    assert not torch.equal(found[0] if found[0] is not None else seed, seed)
    assert torch.equal(output, forward(x, y).detach())


def test_the_graph_ends_at_the_tape() -> None:
    x = torch.randn(3, requires_grad=True)
    tape, (output,) = record(torch.exp, [x * 2], [True], [True])
    assert output.grad_fn is None
    assert not output.requires_grad
    tape.backward([torch.ones(3)])
    assert x.grad is None
    assert tape.take_gradients([True])[0] is not None


def test_inputs_share_storage_and_are_left_alone() -> None:
    x = torch.randn(3)
    tape, _ = record(torch.exp, [x], [True], [True])
    assert tape.leaves[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert not x.requires_grad


def test_untracked_inputs_get_no_gradient() -> None:
    tape, _ = record(torch.mul, [torch.randn(3), torch.randn(3)], [True, False], [True])
    tape.backward([torch.ones(3)])
    first, second = tape.take_gradients([True, False])
    assert first is not None
    assert second is None


def test_taking_gradients_empties_the_leaves() -> None:
    tape, _ = record(torch.exp, [torch.randn(3)], [True], [True])
    tape.backward([torch.ones(3)])
    assert tape.take_gradients([True])[0] is not None
    assert tape.take_gradients([True]) == [None]


@pytest.mark.parametrize("seeds", [(True, False), (False, True), (True, True), (False, False)])
def test_outputs_without_a_gradient_are_skipped(seeds: tuple[bool, bool]) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    tape, _ = record(lambda x: (x * first, x * second), [torch.randn(3)], [True], [True, True])
    tape.backward([torch.ones(3) if seed else None for seed in seeds])
    assert (first.grad is not None, second.grad is not None) == seeds
    assert (tape.take_gradients([True])[0] is not None) == any(seeds)


def test_outputs_that_carry_no_gradient_pass_as_they_are() -> None:
    counts = {"rows": 3}
    tape, outputs = record(lambda x: (x.exp(), counts, x.detach() > 0), [torch.randn(3)], [True], [True, False, False])
    assert outputs[1] is counts
    assert outputs[2].dtype is torch.bool
    tape.backward([torch.ones(3), None, None])


def test_an_output_without_graph_is_no_error() -> None:
    tape, (output,) = record(lambda x: torch.ones(3), [torch.randn(3)], [False], [True])
    tape.backward([torch.ones(3)])
    assert tape.take_gradients([False]) == [None]
    assert torch.equal(output, torch.ones(3))


def test_records_a_graph_under_no_grad() -> None:
    weight = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        tape, _ = record(lambda x: x * weight, [torch.randn(3)], [False], [True])
        assert not torch.is_grad_enabled()
    tape.backward([torch.ones(3)])
    assert weight.grad is not None


def test_keywords_reach_forward() -> None:
    _, (output,) = Tape.record(torch.sum, [torch.ones(2, 3)], [True], [True], {"dim": 0})
    assert output.tolist() == [2.0, 2.0, 2.0]


def test_an_output_that_no_backward_needs_dies_with_its_reader() -> None:
    """The tape holds edges: sum() saves no activation, so its input's product is free to go; exp() saves its own."""
    tape, (output,) = record(lambda x: x * 2.0, [torch.randn(100)], [True], [True])
    dead = weakref.ref(output.untyped_storage())
    storage = weakref.ref(output)
    del output
    assert storage() is None
    assert dead() is None
    tape.backward([torch.ones(100)])


def test_backward_runs_once() -> None:
    tape, _ = record(torch.exp, [torch.randn(3)], [True], [True])
    tape.backward([torch.ones(3)])
    with pytest.raises(RuntimeError, match="second time"):
        tape.backward([torch.ones(3)])


def test_what_is_shed_is_not_held() -> None:
    """The memory of a shed input goes with its last other holder, where the graph keeps nothing of it."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] / 2

    seed = torch.randn(3, 4)
    alive = {}
    for sheds in ((), (0,)):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        tape, _ = Tape.record(lambda a, b: Halved.apply(a) * b, [x, y], [True, True], [True], {}, sheds)
        storage = weakref.ref(x.untyped_storage())
        del x
        alive[sheds] = storage() is not None
        tape.backward([seed])
        found = tape.take_gradients([True, True])
        assert found[0] is not None
        assert torch.equal(found[0], seed * y / 2)
        assert found[0].is_contiguous()
    assert alive == {(): True, (0,): False}


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 4)])
def test_a_graph_may_need_what_is_shed(shape: tuple[int, ...]) -> None:
    x, seed = torch.randn(shape), torch.randn(shape)
    want = x.clone()
    tape, _ = Tape.record(torch.square, [x], [True], [True], {}, (0,))
    del x
    tape.backward([seed])
    (found,) = tape.take_gradients([True])
    assert found is not None
    assert torch.equal(found, 2 * want * seed)


def test_an_untracked_input_is_not_shed() -> None:
    x, y = torch.randn(3), torch.randn(3)
    want = x.clone()
    tape, _ = Tape.record(torch.mul, [x, y], [False, True], [True], {}, (0,))
    assert torch.equal(x, want)
    tape.backward([torch.ones(3)])
    assert torch.equal(tape.leaves[1].grad, want)
