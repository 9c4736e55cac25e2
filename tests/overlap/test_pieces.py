"""Which gradients may be what a pipeline part received."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.builder import ProgramBuilder
from overlap.ir import Lane, Op
from overlap.lower import lower
from overlap.orders import get_order
from overlap.pieces import passed_on
from overlap.plan import BACKWARD_SIDE, make_schedule
from recompute import RecomputeConfig
from tests.overlap.programs import Weight, side_of


def part(lane: Lane) -> Any:
    """Two layers with a residual each; what the last one writes is sent away."""
    b = ProgramBuilder()
    h = b.input("x", needs_grad=True)
    for layer in range(2):
        with b.layer(layer):
            (mixed,) = b.compute("attn", torch.mul, h, outputs=("mixed",), parameters=(Weight(),), wgrad=True)
            (h,) = b.compute("post", torch.add, h, mixed, outputs=("out",))
    b.comm("send", lambda h: (), h, outputs=(), adjoint=lambda grads, pinned: (grads,), lane=lane)
    return b.build()


@pytest.mark.parametrize(
    ("lane", "expected"),
    [(Lane.P2P, {("0.out", "1.post"), ("1.mixed", "1.post"), ("0.out", "1.attn")}), (Lane.COMM, set())],
)
def test_a_residual_hands_on_what_was_received(lane: Lane, expected: set[tuple[str, str]]) -> None:
    """As far as the layer's input: its two shares are added up, which makes new memory."""
    program = part(lane)
    sides = {BACKWARD_SIDE: side_of(program, RecomputeConfig.none())}
    schedule = make_schedule(get_order("plain"), None, sides[BACKWARD_SIDE], delayed=False)
    found = {(value, program.stages[place].label) for _, (value, place) in passed_on(schedule, sides)}
    assert found == expected


@pytest.mark.parametrize("lane", [Lane.P2P, Lane.COMM])
def test_a_put_off_weight_gradient_waits_with_it_too(lane: Lane) -> None:
    """Of the last layer, whose gradient was received; the layer before adds two shares up."""
    program = part(lane)
    sides = {BACKWARD_SIDE: side_of(program, RecomputeConfig.none())}
    schedule = make_schedule(get_order("plain"), None, sides[BACKWARD_SIDE], delayed=True)
    owners = {i.stage.label: i.pending_owners for i in lower(schedule, sides, {}).issues if i.slot.op is Op.WGRAD}
    assert owners == {"1.attn": (Lane.P2P,) if lane is Lane.P2P else (), "0.attn": ()}
