"""Gradients that a tape takes over go when the first node has used them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from recompute.tape import Tape
from tests.recompute.looks import doubled_twice


@pytest.mark.parametrize("sheds", [(0,), ()])
def test_a_gradient_goes_after_its_first_use(sheds: tuple[int, ...]) -> None:
    alive: list[bool] = []
    watched: list[weakref.ref[torch.UntypedStorage]] = []

    x, seed = torch.randn(3, 4), torch.randn(3, 4)
    tape, (output,) = Tape.record(
        doubled_twice(lambda gradient: alive.append(watched[0]() is not None)),
        [x], [True], [True], {}, sheds,
    )  # fmt: skip
    assert torch.equal(output, x * 4)
    given = seed.clone()
    watched.append(weakref.ref(given.untyped_storage()))
    gradients: list[Tensor | None] = [given]
    del given
    tape.take_over(gradients)
    tape.backward(gradients)
    assert alive == [True, not sheds]
    (found,) = tape.take_gradients([True])
    assert found is not None
    assert torch.equal(found, seed * 4)


def test_what_is_not_taken_over_goes_the_usual_way() -> None:
    tape, _ = Tape.record(torch.exp, [torch.zeros(3)], [True], [True], {}, (0,))
    tape.backward([torch.ones(3)])
    assert torch.equal(tape.take_gradients([True])[0], torch.ones(3))


def test_an_output_without_a_gradient() -> None:
    tape, _ = Tape.record(lambda x: (x.exp(), x.sin()), [torch.zeros(3)], [True], [True, True], {}, (0,))
    gradients = [None, torch.ones(3)]
    tape.take_over(gradients)
    tape.backward(gradients)
    assert torch.equal(tape.take_gradients([True])[0], torch.ones(3))
