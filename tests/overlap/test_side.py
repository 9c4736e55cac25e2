"""A side knows segments, first passes, and what backward needs replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap.builder import ProgramBuilder
from overlap.ir import Op, Program, parse_schedule
from overlap.orders import get_order
from overlap.plan import BACKWARD_SIDE, make_schedule
from overlap.side import Side, stages_of
from overlap.validate import validate
from recompute import RecomputeConfig
from tests.overlap.programs import Weight, dummy_program, label, nothing, side_of


def needed(program: Program, config: RecomputeConfig) -> set[str]:
    return {label(key) for key in side_of(program, config).replay_needed}


def test_segments_of_stages() -> None:
    side = side_of(dummy_program("MMM"), RecomputeConfig.uniform(2))
    by_key = side.program.by_key
    assert [side.segment(by_key[layer, "attn"]) for layer in range(3)] == [0, 0, 1]
    assert side.segment(by_key[None, "head"]) is None


@pytest.mark.parametrize(
    ("keeps_graph", "embed", "attn"), [(True, Op.FORWARD, Op.NO_GRAD), (False, Op.NO_GRAD, Op.NO_GRAD)]
)
def test_first_pass(keeps_graph: bool, embed: Op, attn: Op) -> None:
    side = replace(side_of(dummy_program("M"), RecomputeConfig.uniform(1)), keeps_graph=keeps_graph)
    assert side.first_pass(side.program.by_key[None, "embed"]) is embed
    assert side.first_pass(side.program.by_key[0, "attn"]) is attn


def test_replay_needed_is_what_backward_needs_and_what_feeds_it() -> None:
    last = {"1.attn", "1.dispatch", "1.experts"}
    first = {"0.attn", "0.dispatch", "0.experts", "0.combine", "0.post"}
    assert needed(dummy_program("MM"), RecomputeConfig.uniform(2)) == first | last
    assert needed(dummy_program("MM"), RecomputeConfig.block(1)) == first - {"0.combine", "0.post"}
    assert needed(dummy_program("MM"), RecomputeConfig.none()) == set()


def test_what_is_pinned_brings_no_replay_of_its_writer() -> None:
    """Its readers get what the first pass pinned, and a schedule without the writer's replay is accepted."""
    b = ProgramBuilder()
    x = b.input("x")
    with b.layer(0):
        y, choice = b.compute("attn", nothing, x, outputs=("y",), nondiff=("choice",), pins=("choice",))
        (z,) = b.compute("experts", nothing, x, choice, outputs=("z",), parameters=(Weight(),))
        (loss,) = b.compute("post", nothing, y, z, outputs=("loss",), adjoint=nothing)
    b.loss(loss)
    side = side_of(b.build(), RecomputeConfig.uniform(1))
    assert {label(key) for key in side.replay_needed} == {"0.experts"}
    validate(make_schedule(get_order("plain"), None, side, delayed=False), {BACKWARD_SIDE: side})


def test_what_does_not_train_is_replayed_only_as_food() -> None:
    frozen = dummy_program("MM", frozen=1)
    assert needed(frozen, RecomputeConfig.block(1)) == set()
    assert "0.attn" in needed(frozen, RecomputeConfig.uniform(2))


def test_gradients_reach_values_of_trained_stages() -> None:
    side = side_of(dummy_program("MM", frozen=1))
    assert [side.needs_grad(v) for v in ("ids", "embedded", "0.out", "1.residual", "1.routing")] == [
        False, False, False, True, False,
    ]  # fmt: skip
    assert side.needs_activations(side.program.by_key[1, "experts"])
    assert not side.needs_activations(side.program.by_key[1, "dispatch"])
    assert not side.needs_activations(side.program.by_key[0, "experts"])


def test_stages_of_a_schedule_come_from_each_side() -> None:
    sides: dict[int, Side] = {0: side_of(dummy_program("M")), 1: side_of(dummy_program("D"))}
    stages = stages_of(parse_schedule("B0.0.dispatch F1.0.attn"), sides)
    assert stages == [sides[0].program.by_key[0, "dispatch"], sides[1].program.by_key[0, "attn"]]
