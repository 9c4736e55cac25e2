"""Recompute as a rewrite of the schedule: what is replayed, where, and what is left out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.expand import expand
from overlap.ir import Op, Program, Schedule, format_schedule
from overlap.orders import ORDER_NAMES, get_order
from overlap.passes import add_replay, delay_wgrad, drop_untrained, elide_replay
from overlap.plan import make_schedule
from recompute import RecomputeConfig
from tests.overlap.programs import dummy_program, side_of

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none

BACK = {
    layer: f"B0.{layer}.post B0.{layer}.combine {{}} B0.{layer}.experts B0.{layer}.dispatch B0.{layer}.attn"
    for layer in (0, 1)
}
WHOLE = "R0.{0}.attn R0.{0}.dispatch R0.{0}.experts R0.{0}.combine R0.{0}.post"
LAST = "R0.{0}.attn R0.{0}.dispatch R0.{0}.experts"


def words(*parts: str) -> str:
    return " ".join(" ".join(parts).split())


def backward(program: Program, config: RecomputeConfig) -> tuple[Schedule, Schedule]:
    """The backward of a chunk alone with its replays, before and after elide_replay."""
    sides = {0: side_of(program, config)}
    schedule = expand(get_order("plain"), None, (0, program))
    schedule = delay_wgrad(drop_untrained(schedule, sides), sides, delayed=False)
    replayed = add_replay(schedule, sides)
    return replayed, elide_replay(replayed, sides)


@pytest.mark.parametrize(
    ("config", "whole", "elided"),
    [
        (
            uniform(1),
            words(BACK[1].format(WHOLE.format(1)), BACK[0].format(WHOLE.format(0))),
            words(BACK[1].format(LAST.format(1)), BACK[0].format(LAST.format(0))),
        ),
        (
            uniform(2),
            words(BACK[1].format(WHOLE.format(0) + " " + WHOLE.format(1)), BACK[0].format("")),
            words(BACK[1].format(WHOLE.format(0) + " " + LAST.format(1)), BACK[0].format("")),
        ),
        (
            block(1),
            words(BACK[1].format(""), BACK[0].format(WHOLE.format(0))),
            words(BACK[1].format(""), BACK[0].format(LAST.format(0))),
        ),
        (none(), words(BACK[1].format(""), BACK[0].format("")), words(BACK[1].format(""), BACK[0].format(""))),
    ],
    ids=str,
)
def test_replay_stands_before_the_first_backward_that_needs_it(
    config: RecomputeConfig, whole: str, elided: str
) -> None:
    before, after = backward(dummy_program("MM"), config)
    assert format_schedule(before) == words("B0.head", whole, "B0.embed")
    assert format_schedule(after) == words("B0.head", elided, "B0.embed")


@pytest.mark.parametrize(
    ("config", "first_pass"),
    [(none(), "FF"), (uniform(1), "NN"), (uniform(2), "NN"), (block(1), "NF"), (block(9), "NN")],
)
def test_first_pass_keeps_no_graph_inside_segments(config: RecomputeConfig, first_pass: str) -> None:
    program = dummy_program("MM")
    slots = add_replay(expand(get_order("plain"), (1, program), None), {1: side_of(program, config)})
    assert "".join(slot.op.value for slot in slots if slot.stage == "attn") == first_pass
    assert [str(slot) for slot in slots if slot.layer is None] == ["F1.embed", "F1.head"]


@given(st.integers(1, 6), st.integers(1, 6))
def test_row_60_replayed_transfers_are_counted(layers: int, group: int) -> None:
    """Row 60 (the counting part): k dispatches and k-1 combines for a segment of k MoE layers."""
    _, slots = backward(dummy_program("M" * layers), uniform(group))
    sizes = [min(group, layers - start) for start in range(0, layers, group)]
    replayed = Counter(slot.stage for slot in slots if slot.op is Op.REPLAY)
    assert replayed["dispatch"] == sum(sizes)
    assert replayed["combine"] == sum(size - 1 for size in sizes)


def test_a_post_that_needs_its_input_brings_the_combine_back() -> None:
    """R8: not elidable where the gradient of `post` needs the combine output."""
    before, after = backward(dummy_program("M", plain_post=True), uniform(1))
    assert before == after
    assert format_schedule(after) == words("B0.head", WHOLE.format(0), "B0.0.post B0.0.combine B0.0.experts",
                                           "B0.0.dispatch B0.0.attn B0.embed")  # fmt: skip


def test_delay_wgrad_keeps_or_merges_w() -> None:
    program = dummy_program("M")
    sides = {0: side_of(program)}
    slots = expand(get_order("plain"), None, (0, program))
    assert delay_wgrad(slots, sides, delayed=True) == slots
    assert [slot for slot in slots if slot.op is not Op.WGRAD] == list(delay_wgrad(slots, sides, delayed=False))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (none(), "B0.head W0.head B0.1.post B0.1.combine B0.1.experts B0.1.dispatch B0.1.attn W0.1.experts W0.1.attn"),
        (
            uniform(1),
            words("B0.head W0.head B0.1.post B0.1.combine", LAST.format(1), "B0.1.experts B0.1.dispatch B0.1.attn",
                  "W0.1.experts W0.1.attn"),
        ),
        (
            uniform(2),
            words("B0.head W0.head B0.1.post B0.1.combine", WHOLE.format(0), LAST.format(1),
                  "B0.1.experts B0.1.dispatch B0.1.attn W0.1.experts W0.1.attn"),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_frozen_prefix_has_no_backward(config: RecomputeConfig, expected: str) -> None:
    """R6: nothing below the first trainable parameter is differentiated; it is replayed only to feed a segment."""
    side = side_of(dummy_program("MM", frozen=1), config)
    assert format_schedule(make_schedule(get_order("plain"), None, side, delayed=True)) == expected


def test_adapters_in_a_frozen_model_are_replayed() -> None:
    """Row 20 (the schedule's part): a segment whose input needs no gradient is replayed for its own parameters."""
    program = dummy_program("MM", frozen=2)
    program.by_key[0, "attn"].parameters[0].requires_grad = True
    slots = make_schedule(get_order("plain"), None, side_of(program, uniform(1)), delayed=False)
    assert format_schedule(slots) == words(
        "B0.head", BACK[1].format(LAST.format(1)), BACK[0].format(LAST.format(0)),
    )  # fmt: skip


@given(
    st.sampled_from(ORDER_NAMES),
    st.text("MD", max_size=4),
    st.text("MD", max_size=4),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_passes_leave_first_passes_and_backward_alone(
    order: str, front: str, back: str, group: int, delayed: bool, elide: bool
) -> None:
    config = uniform(group) if group else none()
    forward, behind = side_of(dummy_program(front), config), side_of(dummy_program(back), config)
    slots = make_schedule(get_order(order), forward, behind, delayed=delayed, elide=elide)
    kept = Counter((slot.op in (Op.FORWARD, Op.NO_GRAD), slot.key) for slot in slots if slot.op in set("FNB"))
    assert kept == Counter(
        [(True, key) for key in forward.program.by_key] + [(False, k) for k in behind.program.by_key]
    )
    assert {slot.microbatch for slot in slots if slot.op is Op.REPLAY} <= {0}
    assert any(slot.op is Op.WGRAD for slot in slots) is delayed
