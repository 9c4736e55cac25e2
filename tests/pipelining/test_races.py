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
from recompute.config import RecomputeConfig, Replay
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
@pytest.mark.parametrize("rule", [RecomputeConfig.none(), uniform(1, Replay.HIDDEN)])
def test_no_pair_of_parts_races(order: str, rule: RecomputeConfig) -> None:
    plans, halves, programs = parts(rule, order)
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
