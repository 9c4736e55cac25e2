"""RecordingLanes finds no race in any plan, and finds every fault that is planted in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.builder import ProgramBuilder
from overlap.errors import RaceError
from overlap.ir import Lane, Program
from overlap.lower import Issue, Plan
from overlap.orders import ORDER_NAMES, get_order
from overlap.plan import Planner, StepPlan
from overlap.recording import RecordingLanes
from overlap.step import train_step
from recompute import RecomputeConfig
from tests.overlap.hiding import step_plans
from tests.overlap.programs import FakeOwner, drive, dummy_program, fake_owner, nothing, staying, tiny_chunk, tiny_feeds

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none
CONFIGS = st.sampled_from([none(), uniform(1), uniform(2), uniform(3), block(1), block(2)])

Plans = list[StepPlan]


def run(plans: Plans, program: Program, lanes: RecordingLanes) -> None:
    """Drive one step; the synthetic stages never run."""
    owners: dict[int, FakeOwner] = {}
    for plan, numbers in plans:
        owners.update((n, fake_owner(n, program)) for n in numbers.values() if n not in owners)
        drive(lanes, plan, {side: owners[n] for side, n in numbers.items()})


@given(
    st.sampled_from(ORDER_NAMES),
    st.text("MD", max_size=4),
    st.lists(CONFIGS, min_size=1, max_size=3),
    st.booleans(),
    st.fixed_dictionaries(
        {"tied": st.booleans(), "shared": st.booleans(), "plain_post": st.booleans(), "frozen": st.integers(0, 2)}
    ),
    st.integers(0, 4),
    st.booleans(),
)
def test_no_plan_races(
    order: str, kinds: str, configs: list[RecomputeConfig], delayed: bool, shape: dict, lead: int, fed: bool
) -> None:
    """Row 47 (waits and announced uses, on the record): any order, rule, pairing, lead and mix of configs."""
    if shape["tied"]:
        shape = {**shape, "frozen": 0}
    program = dummy_program(kinds, **shape)
    if fed:
        program = sending_fed(program)
    lanes = RecordingLanes()
    planner = Planner(program, get_order(order), delayed=delayed, lead=min(lead, len(kinds)))
    plans = step_plans(planner, configs)
    for _ in range(2):
        run(plans, program, lanes)
        assert lanes.alive() == []
        lanes.finish()


@pytest.mark.parametrize("order", ORDER_NAMES)
def test_a_real_step_runs_on_recording_lanes(order: str) -> None:
    lanes = RecordingLanes()
    chunk = tiny_chunk("MD", recompute=uniform(1), order=order, lanes=lanes, delay_wgrad=True)
    for _ in range(2):
        train_step(chunk, tiny_feeds(3))
        assert lanes.log[-1] == "join"


def relay() -> Program:
    """Compute, send, compute: the last stage reads what both before it wrote."""
    b = ProgramBuilder()
    x = b.input("x", needs_grad=True)
    with b.layer(0):
        (y,) = b.compute("attn", nothing, x, outputs=("y",))
        (z,) = b.comm("send", nothing, y, outputs=("z",), adjoint=nothing)
        (out,) = b.compute("add", nothing, y, z, outputs=("out",))
    b.loss(out)
    return b.build()


def test_the_record_of_a_step() -> None:
    lanes = RecordingLanes()
    program = relay()
    run(step_plans(Planner(program, get_order("plain"), delayed=False), [uniform(1)]), program, lanes)
    lanes.finish()
    assert lanes.log == [
        "compute launch N1.0.attn",
        "compute use x @0",
        "compute write 0.y @0",
        "comm launch N1.0.send",
        "comm wait N.0.attn",
        "comm use 0.y @0",
        "comm write 0.z @0",
        "compute launch N1.0.add",
        "compute wait N.0.send",
        "compute use 0.y @0",
        "compute use 0.z @0",
        "compute write 0.out @0",
        "compute release 0.y @0",
        "compute release 0.z @0",
        "compute release 0.out @0",
        "compute launch R0.0.attn",
        "compute use x @0",
        "compute write 0.y' @0",
        "compute release x @0",
        "comm launch R0.0.send",
        "comm wait R.0.attn",
        "comm use 0.y' @0",
        "comm write 0.z' @0",
        "compute launch R0.0.add",
        "compute wait R.0.send",
        "compute use 0.y' @0",
        "compute use 0.z' @0",
        "compute write 0.out' @0",
        "compute release 0.y' @0",
        "compute release 0.z' @0",
        "compute release 0.out' @0",
        "compute launch B0.0.add",
        "compute write grad 0.y/2 @0",
        "compute write grad 0.z/2 @0",
        "comm launch B0.0.send",
        "comm wait B.0.add",
        "comm use grad 0.z/2 @0",
        "comm write grad 0.y/1 @0",
        "comm release grad 0.z/2 @0",
        "compute launch B0.0.attn",
        "compute wait B.0.send",
        "compute use grad 0.y/2 @0",
        "compute use grad 0.y/1 @0",
        "compute write grad x/0 @0",
        "compute release grad 0.y/2 @0",
        "compute release grad 0.y/1 @0",
        "join",
    ]


def planted(plan: Plan, slot: str, change: Callable[[Issue], Issue]) -> Plan:
    """The plan with one issue changed."""
    assert any(str(issue.slot) == slot for issue in plan.issues)
    return replace(plan, issues=tuple(change(i) if str(i.slot) == slot else i for i in plan.issues))


def caught(slot: str, change: Callable[[Issue], Issue], *, program: Program | None = None) -> RaceError:
    """Run a step of two microbatches whose last plan has a fault."""
    program = program or dummy_program("MM")
    plans = step_plans(Planner(program, get_order("multi_queue"), delayed=False), [uniform(2), uniform(2)])
    plan, numbers = plans[-1]
    with pytest.raises(RaceError) as error:
        run([*plans[:-1], (planted(plan, slot, change), numbers)], program, RecordingLanes())
    return error.value


def test_every_wait_inside_a_plan_is_needed() -> None:
    """Each wait that lowering left in place is missed when it is taken out: none is spare, none goes unnoticed."""
    program = dummy_program("MDM", shared=True)
    for config, lead in ((none(), 0), (uniform(1), 0), (uniform(2), 0), (uniform(1), 2)):
        plans = step_plans(Planner(program, get_order("multi_queue"), delayed=False, lead=lead), [config, config])
        for place, (plan, numbers) in enumerate(plans):
            for slot in [str(issue.slot) for issue in plan.issues if issue.waits]:
                broken = planted(plan, slot, lambda issue: replace(issue, waits=()))
                with pytest.raises(RaceError, match="and no wait orders that behind its write"):
                    run([*plans[:place], (broken, numbers)], program, RecordingLanes())


def test_a_wait_removed() -> None:
    error = caught("R0.1.dispatch", lambda issue: replace(issue, waits=()))
    assert (str(error.slot), error.value) == ("R0.1.dispatch", "1.tokens' @1")
    assert error.rule == "is used on comm, and no wait orders that behind its write on compute"


def test_a_wait_for_a_gradient_removed() -> None:
    error = caught("B0.1.dispatch", lambda issue: replace(issue, waits=()))
    assert error.value == "grad 1.sent/8 @1"
    assert error.rule.startswith("is used on comm, and no wait")


def test_an_event_that_nobody_records() -> None:
    error = caught("R0.0.attn", lambda issue: replace(issue, signals=False))
    assert str(error) == "R0.0.dispatch, R.0.attn: is waited for, but its slot recorded no event"


def test_a_free_moved_up() -> None:
    error = caught("R0.0.attn", lambda issue: replace(issue, frees=(*issue.frees, ("0.tokens", 1))))
    assert str(error) == "R0.0.dispatch, 0.tokens' @1: is used after R0.0.attn released it"


def test_a_free_of_an_earlier_plans_value_moved_up() -> None:
    error = caught("B0.1.post", lambda issue: replace(issue, frees=(("0.routing", 0),)))
    assert str(error) == "R0.0.attn, 0.routing @1: is used after B0.1.post released it"


def test_a_value_freed_twice() -> None:
    error = caught("R0.0.experts", lambda issue: replace(issue, frees=(*issue.frees, ("0.tokens", 1))))
    assert str(error) == "R0.0.experts, 0.tokens' @1: is released, but R0.0.dispatch did so before"


@pytest.mark.parametrize(
    ("slot", "value", "used_on"),
    [("R0.0.dispatch", "0.tokens' @1", "comm"), ("R0.0.experts", "0.sent' @1", "compute")],
)
def test_a_foreign_use_dropped(slot: str, value: str, used_on: str) -> None:
    error = caught(slot, lambda issue: replace(issue, foreign=()))
    owner = "compute" if used_on == "comm" else "comm"
    assert (str(error.slot), error.value) == (slot, value)
    assert error.rule == (
        f"goes back to {owner}, which is not behind its use by {slot} on {used_on}; nor was the allocator told of "
        "that use (R14)"
    )


def test_a_foreign_use_of_a_gradient_dropped() -> None:
    error = caught("B0.1.combine", lambda issue: replace(issue, foreign_pieces=()))
    assert error.value == "grad 1.mixed/10 @1"
    assert "which is not behind its use by B0.1.combine on comm" in error.rule


def sending_fed(program: Program) -> Program:
    """The same where `dispatch` reads a fed value too, which replays read again."""
    return replace(
        program,
        stages=tuple(replace(s, reads=(*s.reads, "target")) if s.name == "dispatch" else s for s in program.stages),
    )


@pytest.mark.parametrize("config", [none(), uniform(1), uniform(2), block(1)], ids=str)
def test_communication_that_reads_a_fed_value_tells_the_allocator(config: RecomputeConfig) -> None:
    """The step holds its copies of feeds alone: their memory is the compute lane's when the last use lets them go."""
    program = sending_fed(dummy_program("MMD"))
    plans = step_plans(Planner(program, get_order("multi_queue"), delayed=False), [config] * 3)
    lanes = RecordingLanes()
    run(plans, program, lanes)
    assert lanes.alive() == []
    reading = [i for plan, _ in plans for i in plan.issues if i.lane is Lane.COMM and ("target", 0) in i.reads]
    assert len(reading) >= 6
    assert all(dict(zip(i.foreign, i.foreign_owners, strict=True))["target", 0] is Lane.COMPUTE for i in reading)


def test_a_foreign_use_of_a_fed_value_dropped() -> None:
    def silent(issue: Issue) -> Issue:
        kept = [(k, o) for k, o in zip(issue.foreign, issue.foreign_owners, strict=True) if k != ("target", 0)]
        return replace(issue, foreign=tuple(k for k, _ in kept), foreign_owners=tuple(o for _, o in kept))

    error = caught("R0.1.dispatch", silent, program=sending_fed(dummy_program("MM")))
    assert (str(error.slot), error.value) == ("R0.1.dispatch", "target @1")
    assert error.rule.startswith("goes back to compute, which is not behind its use by R0.1.dispatch on comm")


def test_a_free_of_a_fed_value_moved_up() -> None:
    program = sending_fed(dummy_program("MM"))
    error = caught("R0.1.attn", lambda issue: replace(issue, frees=(*issue.frees, ("target", 0))), program=program)
    assert str(error) == "R0.1.dispatch, target @1: is used after R0.1.attn released it"


def test_a_use_that_the_allocating_lane_waited_for_needs_no_announcement() -> None:
    program = relay()
    plans = step_plans(Planner(program, get_order("plain"), delayed=False), [none()])
    plan, numbers = plans[0]
    silent = planted(plan, "F1.0.send", lambda issue: replace(issue, foreign=()))
    assert plan != silent
    run([(silent, numbers)], program, RecordingLanes())


def test_memory_that_was_passed_on_goes_back_to_the_compute_lane() -> None:
    """Its uses there need no announcement; those of the lane that passed it on do."""
    program = staying(dummy_program("MM"))
    plans = step_plans(Planner(program, get_order("multi_queue"), delayed=True), [uniform(1)] * 2)
    assert not any("0.sent" in str(issue.foreign) for plan, _ in plans for issue in plan.issues)
    run(plans, program, RecordingLanes())
    silent = [
        (replace(plan, issues=tuple(replace(i, foreign=(), foreign_pieces=()) for i in plan.issues)), numbers)
        for plan, numbers in plans
    ]
    with pytest.raises(RaceError, match="goes back to compute"):
        run(silent, program, RecordingLanes())


def test_a_use_of_what_nobody_wrote() -> None:
    error = caught("R0.0.attn", lambda issue: replace(issue, writes=issue.writes[1:]))
    assert error.rule == "is used before anything wrote it"


def test_finish_joins_all_lanes_and_forgets_the_step() -> None:
    program = dummy_program("M")
    plans = step_plans(Planner(program, get_order("plain"), delayed=False), [uniform(1)])
    lanes = RecordingLanes()
    run(plans[:1], program, lanes)
    assert lanes.alive() == ["0.routing @0", "embedded @0"]
    lanes.finish()
    assert lanes.alive() == []
    run(plans, program, lanes)


def test_clocks_go_on_from_plan_to_plan() -> None:
    """An import is checked against the lane that wrote it in an earlier plan."""
    program = dummy_program("M")
    (forward, *_), (backward, *_) = step_plans(Planner(program, get_order("plain"), delayed=False), [none()])
    owner, lanes = fake_owner(0, program), RecordingLanes()
    drive(lanes, forward, {1: owner})
    pieces = [i for i in backward.issues if str(i.slot) in {"B0.head", "B0.0.post"}]
    combine = next(i for i in backward.issues if str(i.slot) == "B0.0.combine")
    drive(lanes, replace(backward, issues=(*pieces, combine)), {0: owner})
    assert "comm use 0.routing @0" in lanes.log
