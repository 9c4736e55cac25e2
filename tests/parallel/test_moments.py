from __future__ import annotations

from dataclasses import replace

from overlap.ir import Op
from overlap.lower import Plan
from overlap.orders import get_order
from overlap.parallel.moments import Visit, gradients_of, last_gradients, visits
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, PlanRequest
from recompute import RecomputeConfig
from recompute.config import Keep, Replay
from tests.overlap.programs import dummy_program

HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)


def plan_of(config: RecomputeConfig, *, delayed: bool = False, forward: bool = True) -> Plan:
    program = dummy_program("MMM")
    planner = Planner(program, get_order("multi_queue", config.replay), delayed=delayed)
    return planner.plan(PlanRequest(config if forward else None, config, program.trained()))


def places(plan: Plan, *, layer: int | None, ops: tuple[Op, ...], microbatch: int = BACKWARD_SIDE) -> list[int]:
    return [
        place
        for place, issue in enumerate(plan.issues)
        if issue.slot.layer == layer and issue.slot.op in ops and issue.slot.microbatch == microbatch
    ]


def by_layer(plan: Plan) -> dict[object, tuple[int, ...]]:
    return {issue.stage.key: (issue.slot.layer,) for issue in plan.issues if issue.slot.layer is not None}


def test_gradients_are_complete_with_the_last_slot_that_adds_to_them() -> None:
    for delayed in (False, True):
        plan = plan_of(RecomputeConfig.none(), delayed=delayed)
        last = last_gradients(plan)
        wanted = Op.WGRAD if delayed else Op.BACKWARD
        assert all(plan.issues[last[layer, "experts"]].slot.op is wanted for layer in range(3))
        assert plan.issues[last[1, "dispatch"]].slot.op is Op.BACKWARD
        assert len(last) == len(dummy_program("MMM").stages)


def test_plans_that_give_a_gradient_are_found_among_those_that_run() -> None:
    """One plan at two places, beside one that gives none of it: a backward cut in two gives it in one half only."""
    both = plan_of(RecomputeConfig.none(), delayed=True, forward=False)
    late = tuple(issue for issue in both.issues if issue.slot.op is Op.WGRAD)
    now = replace(both, issues=tuple(issue for issue in both.issues if issue.slot.op is not Op.WGRAD))
    later = replace(both, issues=late)
    (place,) = (at for at, issue in enumerate(late) if issue.stage.key == (1, "experts"))
    assert gradients_of([now, later, now, later], {(1, "dispatch")}).keys() == {0, 2}
    assert gradients_of([later, later], {(1, "experts")}) == {0: place, 1: place}
    assert gradients_of([later], {(7, "experts")}) == {}


def test_a_layer_is_visited_once_forward_and_once_from_replay_to_weight_gradient() -> None:
    plan = plan_of(HIDDEN, delayed=True)
    found = visits(plan, by_layer(plan))
    for layer in (0, 2):
        forward = places(plan, layer=layer, ops=(Op.NO_GRAD,), microbatch=FORWARD_SIDE)
        backward = places(plan, layer=layer, ops=(Op.REPLAY, Op.BACKWARD, Op.WGRAD))
        stretches = {(min(forward), max(forward)), (min(backward), max(backward))}
        assert {(v.first, v.last) for v in found if v.group == layer} == stretches
        assert plan.issues[min(backward)].slot.op is Op.REPLAY
    assert [v.first for v in found] == sorted(v.first for v in found)


def test_visits_of_one_layer_that_overlap_are_one() -> None:
    plan = plan_of(HIDDEN)
    middle = [v for v in visits(plan, by_layer(plan)) if v.group == 1]
    every = [place for place, issue in enumerate(plan.issues) if issue.slot.layer == 1]
    assert middle == [Visit(1, min(every), max(every))]


def test_a_visit_within_another_does_not_end_it() -> None:
    plan = plan_of(HIDDEN, delayed=True)
    own = [issue for issue in plan.issues if issue.slot.layer == 1]
    behind = [issue for issue in own if issue.slot.microbatch == BACKWARD_SIDE]
    ahead = [issue for issue in own if issue.slot.microbatch == FORWARD_SIDE]
    within = replace(plan, issues=(behind[0], *ahead, *behind[1:]))
    assert visits(within, by_layer(within)) == (Visit(1, 0, len(own) - 1),)


def test_a_hidden_replay_has_two_segments_there_and_no_more() -> None:
    plan = plan_of(HIDDEN, delayed=True, forward=False)
    found = visits(plan, by_layer(plan))
    there = [sum(v.first <= place <= v.last for v in found) for place in range(len(plan.issues))]
    assert max(there) == 2
    alone = plan_of(RecomputeConfig.uniform(1), delayed=True, forward=False)
    found = visits(alone, by_layer(alone))
    assert max(sum(v.first <= place <= v.last for v in found) for place in range(len(alone.issues))) == 1


def test_held_groups_are_not_visited() -> None:
    plan = plan_of(HIDDEN)
    assert {v.group for v in visits(plan, by_layer(plan), {0, 2})} == {1}


def test_copies_of_segment_inputs_visit_nobody() -> None:
    """What a store or load moves was written by a stage with parameters, on a lane that must not touch these."""
    plan = plan_of(RecomputeConfig.uniform(1, replay=Replay.HIDDEN, keep=Keep.HOST))
    copies = {place for place, issue in enumerate(plan.issues) if issue.slot.op in (Op.STORE, Op.LOAD)}
    assert any(plan.issues[place].stage.key in by_layer(plan) for place in copies)
    found = visits(plan, by_layer(plan))
    assert not {place for visit in found for place in (visit.first, visit.last)} & copies
