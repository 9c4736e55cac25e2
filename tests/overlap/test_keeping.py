"""Segment inputs that wait elsewhere: where S and L stand, that nothing races, and that no bit changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.engine import Engine, MicrobatchState
from overlap.errors import RaceError, ScheduleError
from overlap.ir import WEIGHTS, Lane, Op, parse_schedule
from overlap.keeping import LOADED, STORED, last_stage
from overlap.lower import Issue, Plan
from overlap.orders import Order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, PlanRequest, StepPlan, make_schedule
from overlap.recording import RecordingLanes
from overlap.reference import reference_step
from overlap.side import Side
from overlap.step import train_step
from overlap.validate import validate
from overlap.verify import step_facts, verify
from recompute import ConfigError, Keep, RecomputeConfig
from recompute.keep import Sharded
from tests.overlap.hiding import HIDDEN, SHAPES, orders, race_free, step_plans, with_mtp
from tests.overlap.programs import (
    Weight,
    differences,
    drive,
    dummy_program,
    fake_owner,
    nothing,
    result_of,
    tiny_chunk,
    tiny_feeds,
)
from tests.overlap.test_selective import chunk, feeds

HOST = Keep.HOST


def uniform(num_layers: int, **settings: Any) -> RecomputeConfig:
    return RecomputeConfig.uniform(num_layers, keep=HOST, **settings)


STAGES = RecomputeConfig.selective("attn", "experts", keep=HOST)
MIXED = RecomputeConfig(
    granularity="selective", method="block", num_layers=1, modules=("experts",), replay="hidden", keep="host"
)
CONFIGS = [
    uniform(1), uniform(2), uniform(1, replay=HIDDEN), uniform(3, replay=HIDDEN), RecomputeConfig.block(2, keep=HOST),
    STAGES, MIXED, RecomputeConfig.none(), RecomputeConfig.uniform(1),
]  # fmt: skip


def schedules(config: RecomputeConfig, kinds: str = "DDD") -> tuple[list[str], list[str]]:
    """The slots of a forward alone and of a backward alone, in the plain order."""
    program = dummy_program(kinds)
    planner = Planner(program, Order.parse("plain", "F.* B.* R.* W.*"), delayed=False)
    requests = PlanRequest(config, None, program.trained()), PlanRequest(None, config, program.trained())
    ahead, behind = ([str(slot) for slot in planner.schedule(request)] for request in requests)
    return ahead, behind


def test_an_input_leaves_behind_its_writer_and_returns_one_segment_ahead() -> None:
    ahead, behind = schedules(uniform(1))
    assert [slot for slot in ahead if slot[0] == "S"] == ["S1.embed", "S1.0.post", "S1.1.post"]
    for slot in ("1.embed", "1.0.post", "1.1.post"):
        first = "F" if slot == "1.embed" else "N"
        assert ahead[ahead.index(f"S{slot}") - 1] == f"{first}{slot}"
    # Layer 2 reads what 1.post wrote, and so on down; the first return stands before all of backward.
    assert behind[0] == "L0.1.post"
    assert behind[behind.index("L0.0.post") + 1] == "R0.2.attn"
    assert behind[behind.index("L0.embed") + 1] == "R0.1.attn"
    assert sum(slot[0] == "L" for slot in behind) == 3


def test_the_last_segment_alone_has_nothing_ahead() -> None:
    _, behind = schedules(uniform(3))
    assert behind[0] == "L0.embed"
    assert sum(slot[0] == "L" for slot in behind) == 1


def test_what_a_graph_keeps_stays() -> None:
    """The head keeps what the last decoder layer wrote, which an MTP depth is replayed from too."""
    model = chunk(uniform(1), mtp=1)
    side = model.planner.side(uniform(1), model.program.trained())
    read = {value for stage in side.stages(2) for value in stage.reads}
    assert "1.hidden" in read
    assert side.stored == ("embedded", "0.hidden")


def test_a_parameter_stays() -> None:
    """The repeated MTP layer's weights are values that replays alone read."""
    model = chunk(uniform(1), mtp=2, mtp_repeat=True)
    side = model.planner.side(uniform(1), model.program.trained())
    weights = model.program.by_key[None, WEIGHTS].writes
    assert set(weights) & {value for key in side.replay_needed for value in side.program.by_key[key].reads}
    assert not set(weights) & {*side.stored}


def skipping() -> Side:
    """Three layers, one segment each, that all read what the first stage wrote; each ends with a transfer."""
    b = ProgramBuilder()
    (x,) = b.compute("embed", nothing, b.input("ids"), outputs=("x",), parameters=(Weight(),))
    hidden = x
    for layer in range(3):
        with b.layer(layer):
            (rows,) = b.compute("attn", nothing, *dict.fromkeys((hidden, x)), outputs=("rows",), parameters=(Weight(),))
            (hidden,) = b.comm("combine", nothing, rows, outputs=("out",), adjoint=nothing)
    (loss,) = b.compute("head", nothing, hidden, outputs=("loss",), parameters=(Weight(),))
    b.loss(loss)
    program = b.build()
    return Planner(program, Order.parse("plain", "F.* B.* R.* W.*"), delayed=False).side(uniform(1), program.trained())


def test_what_several_segments_read_leaves_with_the_last_and_returns_for_the_first() -> None:
    side = skipping()
    slots = [str(s) for s in make_schedule(Order.parse("plain", "F.* B.* R.* W.*"), None, side, delayed=False)]
    assert slots.index("L0.embed") < slots.index("R0.2.attn")
    assert slots.count("L0.embed") == 1
    # The transfer behind it is another lane's: the memory goes back to the lane that wrote it.
    assert last_stage("x", side).key == (2, "attn")


def test_what_is_pinned_stays() -> None:
    """The experts alone are rebuilt: they read the rows that were sent, and how these arrived."""
    config = RecomputeConfig.selective("experts", keep=HOST)
    model = chunk(config, layers=1)
    side = model.planner.side(config, model.program.trained())
    (experts,) = (stage for stage in model.program.stages if stage.name == "experts")
    assert set(side.stored) == {value for value in experts.reads if not model.program.nondiff(value)}
    assert len(side.stored) < len(experts.reads)


def test_a_layer_that_is_not_recomputed_has_no_input_to_store() -> None:
    ahead, behind = schedules(RecomputeConfig.block(1, keep=HOST))
    assert [slot for slot in ahead + behind if slot[0] in "SL"] == ["S1.embed", "L0.embed"]


def test_facts_count_moves() -> None:
    facts = step_facts(chunk(uniform(1), layers=3), 2)
    assert (facts.slots["S"], facts.slots["L"]) == (6, 6)
    assert facts.replayed_a2a_per_layer == 1.0


def plans(config: RecomputeConfig, kinds: str = "MMM") -> list[StepPlan]:
    planner = Planner(dummy_program(kinds), Order.parse("plain", "F.* B.* R.* W.*"), delayed=False)
    return step_plans(planner, [config] * 2)


def test_first_copies_go_when_the_layer_that_reads_them_is_done() -> None:
    """The slot that lets go waits for the copy, so that its lane has the memory back for sure."""
    (first, _), *_ = plans(uniform(1))
    gone = {key[0]: issue for issue in first.issues for key in issue.frees if (key[0], STORED) in _written(first)}
    assert {value: str(issue.slot) for value, issue in gone.items()} == {
        "embedded": "N1.0.post", "0.out": "N1.1.post", "1.out": "N1.2.post",
    }  # fmt: skip
    for issue in gone.values():
        assert [event[0] for event in issue.waits if event[0] is Op.STORE] == [Op.STORE]
    assert first.exports[FORWARD_SIDE] >= {(value, STORED) for value in gone}
    assert not any(key[1] in (0, LOADED) and key[0] in gone for key in first.exports[FORWARD_SIDE])


@pytest.mark.parametrize("config", [uniform(1), STAGES, MIXED])
def test_a_lane_that_lets_go_waits_for_the_copies_itself(config: RecomputeConfig) -> None:
    """Also where another wait implies it: lanes of streams have memory back through waits of their own only."""
    for plan, _ in plans(config)[:2]:
        places = {(issue.slot.microbatch, issue.slot.op, issue.stage.key): n for n, issue in enumerate(plan.issues)}
        for issue in plan.issues:
            copies = [event for event, _ in issue.follows if event[0] is Op.STORE]
            assert bool(copies) == bool(issue.lets_go)
            last = max(copies, key=lambda event: places[issue.slot.microbatch, *event], default=None)
            assert last is None or last in issue.waits


def _written(plan: Plan) -> set[Any]:
    return {key for issue in plan.issues for key in issue.writes}


def test_returns_follow_the_compute_before_them() -> None:
    """Else all of them would be issued to an idle copy lane at once."""
    *_, (last, _) = plans(uniform(1))
    loads = [issue for issue in last.issues if issue.slot.op is Op.LOAD]
    assert [len(issue.waits) for issue in loads] == [0, 1, 1]
    for issue in loads[1:]:
        before = [other for other in last.issues[: last.issues.index(issue)] if other.lane is Lane.COMPUTE]
        assert issue.waits == ((before[-1].slot.op, before[-1].slot.key),)


@given(orders(), st.text("MD", max_size=5), st.integers(0, 2),
       st.lists(st.sampled_from(CONFIGS), min_size=1, max_size=3), st.booleans(), SHAPES,
       st.integers(0, 5))  # fmt: skip
def test_nothing_races(
    order: Order, kinds: str, mtp: int, configs: list[RecomputeConfig], delayed: bool, shape: dict[str, Any], lead: int
) -> None:
    program = with_mtp(dummy_program(kinds, **shape), min(mtp, len(kinds)))
    race_free(Planner(program, order, delayed=delayed, lead=min(lead, len(kinds))), configs)


@pytest.mark.parametrize("op", [Op.STORE, Op.LOAD, Op.REPLAY])
def test_a_missing_wait_is_found(op: Op) -> None:
    """Planted: a copy that does not wait for the writer, a replay that does not wait for the copy back."""
    program = dummy_program("MMM")
    planner = Planner(program, Order.parse("plain", "F.* B.* R.* W.*"), delayed=False)
    owner = fake_owner(0, program)
    lanes = RecordingLanes()
    found = 0
    for plan, numbers in step_plans(planner, [uniform(1)]):
        sides = {side: owner for side in numbers}
        for place, issue in enumerate(plan.issues):
            needs = [event for event in issue.waits if event[0] not in (Op.BACKWARD, Op.WGRAD)]
            if issue.slot.op is not op or issue.stage.lane is not Lane.COMPUTE or not needs or found:
                continue
            broken = replace(plan, issues=(*plan.issues[:place], replace(issue, waits=()), *plan.issues[place + 1 :]))
            with pytest.raises(RaceError, match="no wait orders"):
                drive(lanes, broken, sides)
            found += 1
            break
        if found:
            break
        drive(lanes, plan, sides)
    # What a return reads was written on its own lane: there is no wait to leave out.
    assert found == (op is not Op.LOAD)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("L0.embed", "R0.0.attn reads 'embedded', which waits elsewhere and was not brought back"),
        ("S1.embed", "microbatch 1: S of embed is missing"),
    ],
)
def test_a_slot_left_out_is_refused(left_out: str, message: str) -> None:
    program = dummy_program("DD")
    planner = Planner(program, Order.parse("plain", "F.* B.* R.* W.*"), delayed=False)
    side = planner.side(uniform(1), program.trained())
    slots = make_schedule(planner.order, side, side, delayed=False)
    sides = {FORWARD_SIDE: side, BACKWARD_SIDE: side}
    with pytest.raises(ScheduleError, match=message):
        validate(tuple(slot for slot in slots if str(slot) != left_out), sides)
    with pytest.raises(ScheduleError, match="moves nothing"):
        validate((*slots, *parse_schedule("S1.1.post")), sides)


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        ("S0.embed", "S0.embed moves what no earlier slot writes"),
        ("L0.embed", "L0.embed brings back what never left"),
    ],
)
def test_a_copy_before_there_is_something_to_copy_is_refused(moved: str, message: str) -> None:
    ahead, behind = schedules(uniform(1), "DD")
    slots = [f"{slot[0]}0{slot[2:]}" for slot in ahead] + behind
    program = dummy_program("DD")
    side = Planner(program, Order.parse("plain", "F.* B.* R.* W.*"), delayed=False).side(uniform(1), program.trained())
    validate(parse_schedule(" ".join(slots)), {0: side})
    slots.remove(moved)
    with pytest.raises(ScheduleError, match=message):
        validate(parse_schedule(" ".join([moved, *slots])), {0: side})


REAL = [
    (uniform(1), {"dropout": 0.1, "attention_dropout": 0.1, "delay": True, "layers": 2}),
    (uniform(2, replay=HIDDEN), {"mtp": 1, "mhc": 2, "mhc_iterations": 2, "order": "single_queue"}),
    (RecomputeConfig.block(2, keep=HOST), {"dtype": "bfloat16", "mtp": 1}),
    (RecomputeConfig.selective("attn", "experts", "shared_experts", keep=HOST), {"dropout": 0.1, "delay": True}),
]


@pytest.mark.parametrize(("config", "shape"), REAL)
def test_no_bit_changes(config: RecomputeConfig, shape: dict) -> None:
    verdict = verify(chunk(config, **{"layers": 3, **shape}), [feeds(3)])
    assert verdict.equal, verdict


@pytest.mark.parametrize("config", CONFIGS)
def test_no_bit_of_a_tiny_program_changes(config: RecomputeConfig) -> None:
    expected, found = (tiny_chunk("MMM", shape={"dropout": 0.3}, recompute=config) for _ in range(2))
    reference_step(expected, tiny_feeds(3))
    train_step(found, tiny_feeds(3))
    assert differences(result_of(expected), result_of(found)) == []


def test_microbatches_may_keep_elsewhere_or_not() -> None:
    configs = [uniform(1), RecomputeConfig.uniform(1), STAGES, MIXED]
    expected, found = (tiny_chunk("MMM", shape={"shared": True}, recompute=configs) for _ in range(2))
    reference_step(expected, tiny_feeds(4))
    train_step(found, tiny_feeds(4))
    assert differences(result_of(expected), result_of(found)) == []


class Stale(Engine):
    """Control: what returns is another microbatch's."""

    first: Any = None

    def _load(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._load(issue, owner)
        for key in issue.writes:
            if key is not None and issue.slot.key == (0, "post"):
                self.first = owner.values[key] if self.first is None else self.first
                owner.values[key] = self.first


def test_a_wrong_input_is_seen() -> None:
    verdict = verify(chunk(uniform(1)), [feeds()], engine_type=Stale)
    assert verdict.gradients.different
    assert verdict.loss_equal


def test_sharded_needs_ranks_and_ranks_need_sharded() -> None:
    with pytest.raises(ConfigError, match=r"keep='sharded': needs ModelChunk\(shards="):
        chunk(RecomputeConfig.uniform(1, keep=Keep.SHARDED))
    model = chunk(uniform(1))
    group: Any = object.__new__(Sharded)  # one without ranks
    with pytest.raises(ConfigError, match=r"shards=.*has no effect unless a config has keep='sharded'"):
        ModelChunk(model.module, recompute=uniform(1), shards=group)
    sharded = ModelChunk(model.module, recompute=RecomputeConfig.uniform(1, keep=Keep.SHARDED), shards=group)
    ranks = sharded.shards
    with pytest.raises(ConfigError, match=r"keep='sharded': needs ModelChunk\(shards="):
        sharded.shards = None
    assert sharded.shards is ranks


def test_the_contiguous_path_refuses() -> None:
    with pytest.raises(ConfigError, match="keep='host': needs the slots of the overlapped step"):
        contiguous_step(chunk(uniform(1)), feeds())
