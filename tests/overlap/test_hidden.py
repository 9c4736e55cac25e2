"""Hidden replay: where replays go, that any order with R steps is legal and races nowhere, and that no bit changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.engine import MicrobatchState
from overlap.errors import RaceError, ScheduleError
from overlap.hidden import Hosts, hosts_of, spread
from overlap.ir import Lane, Op, Program, Schedule, format_schedule
from overlap.lanes import Owner
from overlap.lower import Event, Issue, Plan, lower
from overlap.memory.segments import SegmentCounter
from overlap.orders import Order, get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, PlanRequest, make_schedule, segments_of
from overlap.recording import RecordingLanes
from overlap.reference import reference_step
from overlap.side import Side
from overlap.step import train_step
from overlap.validate import validate
from recompute import RecomputeConfig, Replay
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

HIDDEN = Replay.HIDDEN
ORDERS = ("multi_queue", "single_queue")
EVERYTHING = Order.parse("everything", "B.* R.* F.* W.*")


def uniform(num_layers: int) -> RecomputeConfig:
    return RecomputeConfig.uniform(num_layers, replay=HIDDEN)


def block(num_layers: int, *, mtp: bool = False) -> RecomputeConfig:
    return RecomputeConfig.block(num_layers, recompute_mtp=mtp, replay=HIDDEN)


def with_mtp(program: Program, depths: int) -> Program:
    """The same with the last layers declared MTP depths."""
    return replace(program, mtp_layers=frozenset(program.layers[len(program.layers) - depths :]))


def side_of(program: Program, config: RecomputeConfig) -> Side:
    return Side(program, segments_of(program, config), program.trained(), hidden=config.replay is HIDDEN)


HOSTS: list[tuple[str, int, RecomputeConfig, dict[int, tuple[int, ...]]]] = [
    ("MMM", 0, uniform(1), {2: (1,), 1: (0,)}),
    ("MMMM", 0, uniform(2), {3: (0,), 2: (1,)}),
    ("MMMMMM", 0, uniform(3), {5: (0,), 4: (1,), 3: (2,)}),
    # Ragged: one pair takes the two layers that come next.
    ("MMMMM", 0, uniform(2), {4: (2, 3), 3: (0,), 2: (1,)}),
    ("MMMMM", 0, uniform(3), {4: (0,), 3: (1, 2)}),
    # An eager layer hosts only what comes directly next.
    ("MMMM", 0, block(2), {2: (1,), 1: (0,)}),
    ("MMMM", 0, block(9), {3: (2,), 2: (1,), 1: (0,)}),
    # MTP depths: a segment each under uniform, eager under block.
    ("MMMMMM", 2, uniform(2), {5: (4,), 4: (2, 3), 3: (0,), 2: (1,)}),
    ("MMMM", 1, block(3), {3: (2,), 2: (1,), 1: (0,)}),
    ("MMMM", 1, block(2, mtp=True), {2: (1,), 1: (0,)}),
    ("M", 0, uniform(1), {}),
    ("MM", 0, uniform(2), {}),
    ("", 0, uniform(1), {}),
]


@pytest.mark.parametrize(("kinds", "mtp", "config", "hosts"), HOSTS)
def test_hosts(kinds: str, mtp: int, config: RecomputeConfig, hosts: dict[int, tuple[int, ...]]) -> None:
    assert hosts_of(side_of(with_mtp(dummy_program(kinds), mtp), config)).layers == hosts


def test_the_first_segment_sends_its_tokens_beside_the_head() -> None:
    head = hosts_of(side_of(dummy_program("MM"), uniform(1))).head
    assert [stage.label for stage in head] == ["1.attn", "1.dispatch"]
    assert hosts_of(side_of(dummy_program("DD"), uniform(1))).head == ()
    assert hosts_of(side_of(dummy_program("MMM"), block(2))).head == ()


def test_what_does_not_train_is_not_replayed() -> None:
    assert hosts_of(side_of(dummy_program("MMM", frozen=1), uniform(1))).layers == {2: (1,)}
    assert hosts_of(side_of(dummy_program("MMM", frozen=3), uniform(1))).layers == {}


def test_just_in_time_has_no_hosts() -> None:
    assert hosts_of(side_of(dummy_program("MM"), RecomputeConfig.uniform(1))) == Hosts()


@pytest.mark.parametrize(
    ("order", "taken", "rest"),
    [
        ("R.attn R.dispatch R.experts", "attn dispatch experts", "combine post"),
        ("R.* B.* F.*", "attn dispatch experts combine post", ""),
        ("R.attn R.*", "attn dispatch experts combine post", ""),
    ],
)
def test_one_layer_follows_the_names(order: str, taken: str, rest: str) -> None:
    program = dummy_program("M")
    steps, leftovers = spread(Order.parse("mine", order), [program.layer_stages[0]])
    assert [stage.name for stages in steps.values() for stage in stages] == taken.split()
    assert [stage.name for stage in leftovers] == rest.split()


def test_several_layers_are_spread_evenly() -> None:
    program = dummy_program("MM")
    order = Order.parse("mine", "R.attn R.dispatch R.experts R.combine R.post")
    steps, leftovers = spread(order, [program.layer_stages[layer] for layer in (0, 1)])
    assert [[stage.label for stage in stages] for stages in steps.values()] == [
        ["0.attn", "0.dispatch"], ["0.experts", "0.combine"], ["0.post", "1.attn"], ["1.dispatch", "1.experts"],
        ["1.combine", "1.post"],
    ]  # fmt: skip
    assert leftovers == ()


def backward(program: Program, config: RecomputeConfig, order: Order, *, delayed: bool = False) -> Schedule:
    return make_schedule(order, None, side_of(program, config), delayed=delayed)


def test_a_backward_alone() -> None:
    slots = backward(dummy_program("MMM"), uniform(1), get_order("single_queue", HIDDEN), delayed=True)
    assert format_schedule(slots) == (
        "R0.2.attn R0.2.dispatch B0.head W0.head "
        "B0.2.post B0.2.combine R0.1.attn R0.1.dispatch R0.2.experts B0.2.experts W0.2.experts B0.2.dispatch "
        "R0.1.experts B0.2.attn W0.2.attn "
        "B0.1.post B0.1.combine R0.0.attn R0.0.dispatch B0.1.experts W0.1.experts B0.1.dispatch R0.0.experts "
        "B0.1.attn W0.1.attn "
        "B0.0.post B0.0.combine B0.0.experts W0.0.experts B0.0.dispatch B0.0.attn W0.0.attn B0.embed"
    )


def test_a_post_that_needs_its_input_is_replayed_with_the_combine() -> None:
    slots = backward(dummy_program("MM", plain_post=True), uniform(1), get_order("single_queue", HIDDEN))
    assert [slot.stage for slot in slots if slot.op is Op.REPLAY and slot.layer == 0] == [
        "attn", "dispatch", "experts", "combine", "post",
    ]  # fmt: skip


@pytest.mark.parametrize("order", [get_order("plain", HIDDEN), get_order("fused", HIDDEN), get_order("multi_queue")])
def test_an_order_without_replays_hides_none(order: Order) -> None:
    with pytest.raises(ScheduleError, match=f"order {order.name} has no R steps, so it hides no replay"):
        backward(dummy_program("MM"), uniform(1), order)


def test_an_order_that_replays_backwards_is_refused() -> None:
    order = Order.parse("mine", "F.* B.* W.* R.experts R.dispatch R.attn")
    with pytest.raises(ScheduleError, match=r"R0\.0\.experts reads '0\.sent' of its own segment") as caught:
        backward(dummy_program("MM"), uniform(1), order)
    assert "R0.0.experts   <-- here" in str(caught.value)


def test_a_replay_that_is_lost_is_refused() -> None:
    side = side_of(dummy_program("MM"), uniform(1))
    slots = backward(side.program, uniform(1), get_order("single_queue", HIDDEN))
    for lost in [slot for slot in slots if slot.op is Op.REPLAY]:
        with pytest.raises(ScheduleError, match="replay"):
            validate(tuple(slot for slot in slots if slot != lost), {BACKWARD_SIDE: side})


CONFIGS = st.sampled_from(
    [RecomputeConfig.none(), RecomputeConfig.uniform(2), *(uniform(n) for n in (1, 2, 3)), block(1), block(3),
     block(2, mtp=True)]
)  # fmt: skip
SHAPES = st.fixed_dictionaries({"shared": st.booleans(), "plain_post": st.booleans(), "frozen": st.integers(0, 2)})


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Built-in ones, a coarse one, and random interleavings that keep each op's own sequence."""
    name = draw(st.sampled_from([*ORDERS, "everything", "random"]))
    if name in ORDERS:
        return get_order(name, HIDDEN)
    if name == "everything":
        return EVERYTHING
    forward = ["attn", "dispatch", "experts", "combine", "post"]
    rows = {
        "F": ["attn", "shared", *forward[1:]],
        "R": ["attn", "shared", *forward[1:]],
        "B": [*forward[:0:-1], "shared", "attn", "W.*"],
    }
    picks = draw(st.permutations([op for op, row in rows.items() for _ in row]))
    left = {op: iter(row) for op, row in rows.items()}
    steps = [(op, next(left[op])) for op in picks]
    return Order.parse("random", " ".join(stage if "." in stage else f"{op}.{stage}" for op, stage in steps))


def live_segments(slots: Schedule, side: Side) -> int:
    """Most segments of the backward side that have a graph at once."""
    graphs: set[tuple[int | None, str]] = set()
    most = 0
    for slot in slots:
        if slot.microbatch != BACKWARD_SIDE or slot.layer not in side.segment_of:
            continue
        if slot.op is Op.REPLAY and side.needs_activations(side.program.by_key[slot.key]):
            graphs.add(slot.key)
        elif slot.op is Op.BACKWARD:
            graphs.discard(slot.key)
        most = max(most, len({side.segment_of[layer] for layer, _ in graphs if layer is not None}))
    return most


def step_plans(planner: Planner, configs: Sequence[RecomputeConfig]) -> list[tuple[Plan, dict[int, int]]]:
    trained = planner.program.trained()
    plans = []
    for ahead in range(len(configs) + 1):
        front = {FORWARD_SIDE: ahead} if ahead < len(configs) else {}
        back = {BACKWARD_SIDE: ahead - 1} if ahead else {}
        request = PlanRequest(configs[ahead] if front else None, configs[ahead - 1] if back else None, trained)
        plans.append((planner.plan(request), {**front, **back}))
    return plans


@given(orders(), st.text("MD", max_size=6), st.integers(0, 2), st.lists(CONFIGS, min_size=1, max_size=3), st.booleans(),
       SHAPES)  # fmt: skip
def test_any_order_rule_and_pairing_is_legal_and_races_nowhere(
    order: Order, kinds: str, mtp: int, configs: list[RecomputeConfig], delayed: bool, shape: dict[str, Any]
) -> None:
    program = with_mtp(dummy_program(kinds, **shape), min(mtp, len(kinds)))
    planner = Planner(program, order, delayed=delayed)
    lanes = RecordingLanes()
    owners = [fake_owner(number, program) for number in range(len(configs))]
    for plan, numbers in step_plans(planner, configs):
        drive(lanes, plan, {side: owners[number] for side, number in numbers.items()})
    assert lanes.alive() == []
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


def pair_plan(order: str) -> tuple[Plan, Mapping[int, Side]]:
    side = side_of(dummy_program("MMM"), uniform(1))
    sides = {FORWARD_SIDE: side, BACKWARD_SIDE: side}
    schedule = make_schedule(get_order(order, HIDDEN), side, side, delayed=True)
    return lower(schedule, sides, {}), sides


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_waits_for_a_weight_gradient(order: str) -> None:
    """B18: a transfer never waits for W; only the sum of a shared parameter's uses may."""
    plan, _ = pair_plan(order)
    assert [issue.slot for issue in plan.issues if any(op is Op.WGRAD for op, _ in issue.waits)] == []


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
    """B31 and rows 41, 44, 45 (the plan's part): a value goes once, after its last use, whatever aliases it; a share
    of a gradient is made once, and summed once, after it was made."""
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
