"""Plans with hidden replay: legal and free of races for any order, rule and pairing, and no bit changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.engine import MicrobatchState
from overlap.errors import RaceError
from overlap.ir import Lane, Op
from overlap.lanes import Owner
from overlap.lower import Event, Issue, Plan, lower
from overlap.memory.segments import SegmentCounter
from overlap.orders import Order, get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, PlanRequest, make_schedule
from overlap.recording import RecordingLanes
from overlap.reference import reference_step
from overlap.side import Side
from overlap.step import train_step
from recompute import RecomputeConfig, Replay
from tests.overlap.hiding import (
    CONFIGS,
    HIDDEN,
    ORDERS,
    SHAPES,
    block,
    live_segments,
    orders,
    race_free,
    side_of,
    step_plans,
    uniform,
    with_mtp,
)
from tests.overlap.programs import (
    FakeOwner,
    differences,
    drive,
    dummy_program,
    fake_owner,
    label,
    result_of,
    tiny_chunk,
    tiny_feeds,
)


@given(orders(), st.text("MD", max_size=6), st.integers(0, 2), st.lists(CONFIGS, min_size=1, max_size=3), st.booleans(),
       SHAPES, st.integers(0, 6))  # fmt: skip
def test_any_order_rule_and_pairing_is_legal_and_races_nowhere(
    order: Order, kinds: str, mtp: int, configs: list[RecomputeConfig], delayed: bool, shape: dict[str, Any], lead: int
) -> None:
    program = with_mtp(dummy_program(kinds, **shape), min(mtp, len(kinds)))
    planner = Planner(program, order, delayed=delayed, lead=min(lead, len(kinds)))
    race_free(planner, configs)
    for config in configs:
        side = planner.side(config, program.trained())
        slots = make_schedule(order, None, side, delayed=delayed)
        assert live_segments(slots, side) <= (2 if side.hidden else 1)
        replayed = [slot.key for slot in slots if slot.op is Op.REPLAY]
        assert sorted(map(str, replayed)) == sorted(map(str, side.replay_needed))


@given(orders(), st.text("MD", max_size=4), st.text("MD", max_size=4), CONFIGS, CONFIGS, st.booleans())
def test_chunks_of_other_lengths_pair(
    order: Order, front: str, back: str, ahead: RecomputeConfig, behind: RecomputeConfig, delayed: bool
) -> None:
    """Row 62: ragged pairs, each with its own rule; make_schedule validates."""
    sides = side_of(dummy_program(front), ahead), side_of(dummy_program(back), behind)
    slots = make_schedule(order, *sides, delayed=delayed)
    assert live_segments(slots, sides[1]) <= 2


STEPS = [
    ("MMM", uniform(1), {"dropout": 0.3, "stateful": True}),
    ("MDM", uniform(2), {"dropout": 0.3, "tied": True}),
    ("MMMM", block(3), {"shared": True, "plain_post": True}),
    ("DDM", uniform(1), {"stateful": True}),
]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kinds", "config", "shape"), STEPS)
def test_no_bit_changes(order: str, delayed: bool, kinds: str, config: RecomputeConfig, shape: dict[str, Any]) -> None:
    """Row 63: the gradients are those of plain autograd under the order for one queue and the one for many."""
    expected, found = (
        tiny_chunk(kinds, shape=shape, recompute=config, order=order, delay_wgrad=delayed) for _ in range(2)
    )
    reference_step(expected, tiny_feeds(3))
    counter = SegmentCounter(found, 3)
    train_step(found, tiny_feeds(3), observers=(counter,))
    assert differences(result_of(expected), result_of(found)) == []
    assert counter.peak == 2


def test_microbatches_may_hide_replays_or_not() -> None:
    configs = [uniform(1), RecomputeConfig.none(), RecomputeConfig.uniform(2), block(1)]
    expected, found = (tiny_chunk("MMM", recompute=configs) for _ in range(2))
    reference_step(expected, tiny_feeds(4))
    train_step(found, tiny_feeds(4))
    assert differences(result_of(expected), result_of(found)) == []


class OwnEvents:
    """Lanes that check whose end a slot waits for; an event is the microbatch that recorded it."""

    def __init__(self) -> None:
        self.waits = 0

    def begin(self, issue: Issue, owner: Owner) -> None:
        for event in issue.waits:
            self.waits += 1
            if owner.events[event] != owner.number:
                rule = f"is joined with microbatch {owner.events[event]}"
                raise RaceError(issue.slot, f"{event[0].value} {label(event[1])}", rule)

    def end(self, issue: Issue, owner: Owner) -> int:
        return owner.number

    def finish(self) -> None:
        pass


class OneEvent(dict[Event, Any]):
    """A table with one event in it, which every slot records again."""

    last: Any = None

    def __setitem__(self, key: Event, value: Any) -> None:
        self.last = value

    def __getitem__(self, key: Event) -> Any:
        return self.last


@pytest.mark.parametrize("order", ORDERS)
def test_no_wait_joins_microbatches(order: str) -> None:
    """B18: a wait orders slots of one microbatch only, so forward and backward stay independent."""
    program = dummy_program("MMM")
    planner = Planner(program, get_order(order, HIDDEN), delayed=True)
    lanes = OwnEvents()
    owners = [fake_owner(number, program) for number in range(3)]
    plans = step_plans(planner, [uniform(2)] * 3)
    for plan, numbers in plans:
        drive(lanes, plan, {side: owners[number] for side, number in numbers.items()})
    assert lanes.waits > 20
    # Planted: one event for all slots, of both microbatches of a pair.
    shared = OneEvent()
    twins = [FakeOwner(number, dict(owner.values), events=shared) for number, owner in enumerate(owners)]
    plan, numbers = plans[1]
    with pytest.raises(RaceError, match="is joined with microbatch"):
        drive(lanes, plan, {side: twins[number] for side, number in numbers.items()})


def pair_plan(order: str, replay: Replay = HIDDEN) -> tuple[Plan, Mapping[int, Side]]:
    side = side_of(dummy_program("MMM"), RecomputeConfig.uniform(1, replay=replay))
    sides = {FORWARD_SIDE: side, BACKWARD_SIDE: side}
    schedule = make_schedule(get_order(order, replay), side, side, delayed=True)
    return lower(schedule, sides, {}), sides


@pytest.mark.parametrize("replay", Replay)
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_waits_for_a_weight_gradient(order: str, replay: Replay) -> None:
    """B18: a transfer never waits for W; only the sum of a shared parameter's uses may.

    Nor does W wait for a transfer: all it reads is on its own lane since B.
    """
    plan, _ = pair_plan(order, replay)
    assert [issue.slot for issue in plan.issues if any(op is Op.WGRAD for op, _ in issue.waits)] == []
    late = [issue for issue in plan.issues if issue.slot.op is Op.WGRAD]
    assert [issue.slot for issue in late if issue.waits] == []
    assert len(late) >= 2 * 3


@pytest.mark.parametrize("order", ORDERS)
def test_a_wait_removed_is_found(order: str) -> None:
    plan, sides = pair_plan(order)
    program = sides[BACKWARD_SIDE].program
    found = 0
    for place, issue in enumerate(plan.issues):
        if issue.slot.op is not Op.REPLAY or not issue.waits:
            continue
        broken = replace(plan, issues=(*plan.issues[:place], replace(issue, waits=()), *plan.issues[place + 1 :]))
        owners = {number: fake_owner(number, program) for number in (FORWARD_SIDE, BACKWARD_SIDE)}
        first = Planner(program, get_order(order, HIDDEN), delayed=True).plan(
            PlanRequest(uniform(1), None, program.trained())
        )
        lanes = RecordingLanes()
        drive(lanes, first, {FORWARD_SIDE: owners[BACKWARD_SIDE]})
        with pytest.raises(RaceError, match="no wait orders"):
            drive(lanes, broken, owners)
        found += 1
    assert found >= 6


def test_values_of_a_replay_die_at_their_last_use() -> None:
    """R2: what a hidden replay wrote goes when its reader ran, not at the end."""
    plan, _ = pair_plan("single_queue")
    freed = {key: str(issue.slot) for issue in plan.issues for key in issue.frees if key[1] == 1}
    assert freed["0.sent", 1] == "R0.0.experts"
    assert freed["0.tokens", 1] == "R0.0.dispatch"
    assert {issue.lane for issue in plan.issues if issue.slot.op is Op.REPLAY} == {Lane.COMPUTE, Lane.COMM}


@given(orders(), st.text("MD", min_size=1, max_size=4), CONFIGS, st.booleans(), SHAPES)
def test_nothing_goes_while_it_is_needed(
    order: Order, kinds: str, config: RecomputeConfig, delayed: bool, shape: dict[str, Any]
) -> None:
    """Plan only: a value goes once, after its last use; what that does to storages is tests/cases/test_release.py's.

    A share of a gradient is made once, and summed once, after it was made.
    """
    program = dummy_program(kinds, **shape)
    planner = Planner(program, order, delayed=delayed)
    freed: set[tuple[int, Any]] = set()
    made: set[tuple[int, Any]] = set()
    summed: set[tuple[int, Any]] = set()
    for plan, numbers in step_plans(planner, [config] * 2):
        for issue in plan.issues:
            number = numbers[issue.slot.microbatch]
            touched = {(number, key) for key in (*issue.reads, *issue.pinned, *issue.writes) if key is not None}
            assert not touched & freed
            assert {(number, key) for key in issue.frees} <= touched
            freed |= {(number, key) for key in issue.frees}
            pieces = {(number, piece) for group in issue.pieces for piece in group}
            assert pieces <= made
            assert not pieces & summed
            summed |= pieces
            if issue.slot.op is Op.BACKWARD:
                given_now = {(number, piece) for piece in issue.gives if piece is not None}
                assert not given_now & made
                made |= given_now
    assert made == summed


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 3))
def test_a_failed_step_leaves_nothing(layers: int, at: int) -> None:
    """R16 with two segments live: the next step is the one that never failed."""

    class Stop:
        seen = 0

        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            self.seen += issue.slot.op is Op.REPLAY
            if self.seen == at:
                raise RuntimeError("stop")

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

    expected, found = (tiny_chunk("M" * layers, recompute=uniform(1)) for _ in range(2))
    reference_step(expected, tiny_feeds(2))
    with pytest.raises(RuntimeError, match="stop"):
        train_step(found, tiny_feeds(2), observers=(Stop(),))
    found.zero_grad()
    train_step(found, tiny_feeds(2))
    assert differences(result_of(expected), result_of(found)) == []
