"""Plans of pipeline parts under lanes that check happens-before and use after release (R14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap.errors import RaceError
from overlap.ir import Lane, Program
from overlap.lower import Plan
from overlap.model import Decoder
from overlap.model.cut import NoBorder
from overlap.orders import Order, get_order
from overlap.pipelining.layout import make_layout
from overlap.pipelining.pipeline import cut_of
from overlap.pipelining.plans import Half, PairPlans
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner
from overlap.recording import RecordingLanes
from recompute.config import Keep, RecomputeConfig, Replay
from tests.overlap.programs import drive, fake_owner
from tests.pipelining.models import small, uniform

PER_STAGE = (1, 2, 0, 1)


class Remote(NoBorder):
    lane_in = lane_out = Lane.P2P


CARRIED = Order.parse("carried", "W.* F.* R.* B.*")
"""Weight gradients come a pair late."""


def chosen_order(name: str, replay: Replay) -> Order:
    return CARRIED if name == "carried" else get_order(name, replay)


def parts(rule: RecomputeConfig, order: str) -> tuple[PairPlans, list[Half], list[Program]]:
    layout = make_layout(pp=1, vpp=len(PER_STAGE), layers=sum(PER_STAGE), per_stage=PER_STAGE)
    config = small(layers=layout.num_layers, mtp=1, mhc=2)
    programs = [
        Decoder(config, cut=cut_of(layout, stage), border=Remote()).program() for stage in range(len(PER_STAGE))
    ]
    chosen = chosen_order(order, rule.replay)
    planners = {stage: Planner(program, chosen, delayed=True) for stage, program in enumerate(programs)}
    halves = [Half(stage, rule, program.trained()) for stage, program in enumerate(programs)]
    return PairPlans(planners, chosen, delayed=True), halves, programs


@pytest.mark.parametrize("order", ["multi_queue", "single_queue", "early_release", "carried"])
@pytest.mark.parametrize(
    "rule",
    [
        RecomputeConfig.none(),
        uniform(1, Replay.HIDDEN),
        uniform(1, Replay.HIDDEN, keep=Keep.HOST),
        RecomputeConfig.selective("attn", "experts", keep=Keep.HOST),
    ],
    ids=str,
)
def test_no_pair_of_parts_races(order: str, rule: RecomputeConfig) -> None:
    """B22: virtual stages with residual streams and an MTP depth; what mixes the streams stays off the comm lane."""
    plans, halves, programs = parts(rule, order)
    mixers = [stage for program in programs for stage in program.stages if stage.name in ("post", "mtp_post")]
    assert [stage.label for stage in mixers] == [*(f"{layer}.post" for layer in range(5)), "4.mtp_post"]
    assert {stage.lane for stage in mixers} == {Lane.COMPUTE}
    for ahead, behind in ((a, b) for a in range(4) for b in range(4)):
        lanes = RecordingLanes()
        first, second = fake_owner(0, programs[behind]), fake_owner(1, programs[ahead])
        drive(lanes, plans.pair(halves[behind], None), {FORWARD_SIDE: first})
        drive(lanes, plans.pair(halves[ahead], halves[behind]), {FORWARD_SIDE: second, BACKWARD_SIDE: first})
        now, later = plans.halves(halves[ahead])
        drive(lanes, now, {BACKWARD_SIDE: second})
        drive(lanes, later, {BACKWARD_SIDE: second})
        # what `recv` returns goes to another rank, not into the table
        assert [name for name in lanes.alive() if "grad arriving" not in name] == []


def test_a_missing_wait_is_seen() -> None:
    """Negative control: a send that does not wait for what it sends."""
    plans, halves, programs = parts(RecomputeConfig.none(), "multi_queue")
    plan = plans.pair(halves[1], None)
    issues = tuple(replace(issue, waits=()) if issue.stage.name == "send" else issue for issue in plan.issues)
    broken = Plan(issues=issues, imports=plan.imports, exports=plan.exports)
    with pytest.raises(RaceError, match=r"F1\.send"):
        drive(RecordingLanes(), broken, {FORWARD_SIDE: fake_owner(0, programs[1])})


@pytest.mark.parametrize("slot", ["S1.recv", "R0.1.attn"])
def test_a_copy_that_nobody_waits_for_is_seen(slot: str) -> None:
    """Negative control: what arrives is copied out before it is there, or read before it is back."""
    plans, halves, programs = parts(uniform(2, keep=Keep.HOST), "multi_queue")
    lanes, owner = RecordingLanes(), fake_owner(0, programs[1])
    both = [*plans.pair(halves[1], None).issues, *plans.pair(None, halves[1]).issues]
    issues = tuple(replace(issue, waits=()) if str(issue.slot) == slot else issue for issue in both)
    with pytest.raises(RaceError, match=rf"{slot}, received.*no wait orders"):
        drive(lanes, Plan(issues=issues, imports={}, exports={}), {FORWARD_SIDE: owner, BACKWARD_SIDE: owner})


@pytest.mark.parametrize(
    ("slot", "value"),
    [("R0.4.dispatch", "4.tokens'"), ("R0.4.combine", "4.expert_output'"), ("R0.3.combine", "3.expert_output'")],
)
def test_memory_of_a_replay_that_nobody_announces_is_seen(slot: str, value: str) -> None:
    """B22, negative control: a replay's result is read on the other lane and goes back too early."""
    plans, halves, programs = parts(uniform(1, Replay.HIDDEN), "multi_queue")
    lanes, behind, ahead = RecordingLanes(), fake_owner(0, programs[3]), fake_owner(1, programs[1])
    drive(lanes, plans.pair(halves[3], None), {FORWARD_SIDE: behind})
    plan = plans.pair(halves[1], halves[3])
    issues = tuple(replace(issue, foreign=()) if str(issue.slot) == slot else issue for issue in plan.issues)
    with pytest.raises(RaceError, match=rf"{slot}, {value} @0: goes back to compute, which is not behind its use"):
        drive(lanes, replace(plan, issues=issues), {FORWARD_SIDE: ahead, BACKWARD_SIDE: behind})
