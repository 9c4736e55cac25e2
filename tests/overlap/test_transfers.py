"""Where sends and receives of pipeline parts stand in a plan."""

from __future__ import annotations

import pytest

from overlap.ir import Lane, Op, Slot
from overlap.lower import Plan
from overlap.model import Decoder
from overlap.model.cut import NoBorder
from overlap.order_tables import HIDDEN as HIDDEN_TABLES
from overlap.orders import ORDER_NAMES, get_order
from overlap.pipelining.layout import make_layout
from overlap.pipelining.pipeline import cut_of
from overlap.pipelining.plans import Half, PairPlans
from overlap.plan import Planner
from overlap.transfers import place_transfers
from recompute.config import Keep, RecomputeConfig, Replay
from tests.overlap.programs import dummy_program, side_of
from tests.pipelining.models import small, uniform

EXPOSED, HIDDEN = Replay.JUST_IN_TIME, Replay.HIDDEN


class Remote(NoBorder):
    lane_in = lane_out = Lane.P2P


def make_plans(
    per_stage: tuple[int, ...], rule: RecomputeConfig, order: str = "multi_queue", pin: bool = False
) -> tuple[PairPlans, list[Half]]:
    layout = make_layout(pp=1, vpp=len(per_stage), layers=sum(per_stage), per_stage=per_stage)
    config = small(layers=layout.num_layers)
    programs = [
        Decoder(config, cut=cut_of(layout, stage), border=Remote()).program() for stage in range(len(per_stage))
    ]
    chosen = get_order(order, rule.replay)
    planners = {stage: Planner(program, chosen, delayed=True) for stage, program in enumerate(programs)}
    halves = [Half(stage, rule, program.trained()) for stage, program in enumerate(programs)]
    return PairPlans(planners, chosen, delayed=True, pin=pin), halves


def words(plan: Plan) -> list[str]:
    return [str(issue.slot) for issue in plan.issues]


@pytest.mark.parametrize(
    ("order", "replay"),
    # early_release runs attention's backward before the forward layer's transfers
    [
        *((order, EXPOSED) for order in ORDER_NAMES if order != "early_release"),
        *((order, HIDDEN) for order in HIDDEN_TABLES if order != "early_release"),
    ],
)
def test_a_pair_hides_both_sends(order: str, replay: Replay) -> None:
    """The forward send is issued ahead of the last attention backward, the backward send ahead of its W."""
    plans, halves = make_plans((1, 2, 2, 1), uniform(1, replay), order)
    slots = words(plans.pair(halves[1], halves[2]))
    places = [slots.index(word) for word in ("F1.send", "B0.3.attn", "B0.recv", "W0.3.attn")]
    assert places == sorted(places)
    # and each waits as late as it can
    assert slots[slots.index("F1.recv") + 1] == "N1.1.attn"
    assert slots[slots.index("B0.send") + 1] == "B0.4.post"


def test_an_order_that_runs_attention_backward_before_the_transfers_keeps_it_there() -> None:
    plans, halves = make_plans((1, 2, 2, 1), uniform(1, EXPOSED), "early_release")
    slots = words(plans.pair(halves[1], halves[2]))
    places = [slots.index(word) for word in ("B0.3.attn", "N1.2.combine", "F1.send")]
    assert places == sorted(places)


@pytest.mark.parametrize(("ahead", "behind"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (1, 3)])
def test_forward_is_sent_before_backward(ahead: int, behind: int) -> None:
    """Ranks agree on the order of messages whatever the numbers of layers, empty stages included."""
    plans, halves = make_plans((1, 3, 0, 2), uniform())
    slots = words(plans.pair(halves[ahead], halves[behind]))
    if "F1.send" in slots and "B0.recv" in slots:
        assert slots.index("F1.send") < slots.index("B0.recv")
    assert slots.count("F1.send") == int(ahead < 3)
    assert slots.count("B0.recv") == int(behind > 0)


def test_alone() -> None:
    plans, halves = make_plans((1, 1, 0, 1), uniform())
    forward = words(plans.pair(halves[1], None))
    assert (forward[0], forward[-1]) == ("F1.recv", "F1.send")
    backward = words(plans.pair(None, halves[1]))
    assert backward.index("B0.recv") == backward.index("B0.1.attn") + 1
    assert words(plans.pair(halves[2], None)) == ["F1.recv", "F1.send"]
    assert words(plans.pair(None, halves[2])) == ["B0.send", "B0.recv"]
    assert words(plans.evaluation(2)) == ["N1.recv", "N1.send"]


def test_what_is_received_leaves_behind_recv_and_returns_one_segment_ahead() -> None:
    """The lane that allocated it waits for the copy itself, or its memory would be held until the step ends."""
    plans, halves = make_plans((1, 2, 2, 1), uniform(keep=Keep.HOST))
    forward = plans.pair(halves[2], None)
    slots = words(forward)
    assert slots[:3] == ["F1.recv", "S1.recv", "N1.3.attn"]
    send = forward.issues[-1]
    assert (str(send.slot), set(send.lets_go) & set(send.frees)) == ("F1.send", {("received", 0)})
    # N1.4.post has waited for a later copy already
    assert (Op.STORE, (None, "recv")) in send.waits
    backward = words(plans.pair(None, halves[2]))
    assert backward[0] == "L0.3.post"
    assert backward[backward.index("L0.recv") + 1] == "R0.4.attn"
    beside = words(plans.pair(halves[1], halves[2]))
    assert beside[beside.index("F1.recv") + 1 : beside.index("F1.recv") + 3] == ["S1.recv", "N1.1.attn"]


@pytest.mark.parametrize("cut", [False, True])
def test_a_part_that_receives_and_does_not_send_has_the_memory_back_with_a_backward(cut: bool) -> None:
    plans, halves = make_plans((1, 2), uniform(keep=Keep.HOST))
    (first,) = (issue for issue in plans.pair(halves[1], None).issues if ("received", 0) in issue.lets_go)
    # attention does not wait for the copy: its lane gets nothing back
    assert (str(first.slot), first.waits) == ("N1.1.attn", ((Op.FORWARD, (None, "recv")),))
    plan = plans.halves(halves[1])[0] if cut else plans.pair(None, halves[1])
    (last,) = (issue for issue in plan.issues if str(issue.slot) == "B0.recv")
    assert str(plan.issues[plan.issues.index(last) - 1].slot) == "B0.1.attn"
    assert (Op.LOAD, (None, "recv")) in last.waits
    assert [str(issue.slot) for issue in plan.issues if issue.slot.op is Op.LOAD and issue.signals] == [
        "L0.1.post", "L0.recv",
    ]  # fmt: skip


def test_layers_keep_the_numbers_of_the_model() -> None:
    plans, halves = make_plans((2, 3), uniform(2))
    layers = {issue.slot.layer for issue in plans.pair(halves[1], None).issues}
    assert layers == {None, 2, 3, 4}


@pytest.mark.parametrize("pin", [False, True])
def test_weight_gradients_of_recomputed_layers_stay_in_place(pin: bool) -> None:
    """R13: only those of eager layers are put off, unless asked."""
    rule = RecomputeConfig.block(1)
    plans, halves = make_plans((0, 3), rule, pin=pin)
    now, later = plans.halves(halves[1])
    put_off = {issue.slot.layer for issue in later.issues if issue.slot.op is Op.WGRAD}
    assert put_off == ({None, 0, 1, 2} if pin else {None, 1, 2})
    assert {issue.slot.layer for issue in now.issues if issue.slot.op is Op.WGRAD} == (set() if pin else {0})


def test_plans_are_kept() -> None:
    plans, halves = make_plans((1, 1), uniform())
    assert plans.pair(halves[0], halves[1]) is plans.pair(halves[0], halves[1])
    assert plans.halves(halves[1]) is plans.halves(halves[1])
    assert plans.evaluation(0) is plans.evaluation(0)


def test_a_schedule_without_transfers_stays() -> None:
    program = dummy_program("M")
    schedule = (Slot(Op.FORWARD, 1, None, "embed"),)
    assert place_transfers(schedule, {1: side_of(program)}) is schedule
