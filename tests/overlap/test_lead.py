"""A lead: what runs in which plan, in which order, and what is kept; no bit changes, and faults are seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.engine import Engine, MicrobatchState
from overlap.errors import ScheduleError
from overlap.ir import Op, Schedule, format_schedule, parse_schedule
from overlap.lead import check_lead, check_second, handed_over, interleave, leading, remaining
from overlap.lower import Issue
from overlap.memory.segments import SegmentCounter
from overlap.model import Decoder, ModelConfig
from overlap.orders import ORDER_NAMES, Order, get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, LEAD_SIDE, Planner, StepPlan, make_schedule
from overlap.reference import reference_step
from overlap.side import Side
from overlap.step import forward_only, step_plans, train_step
from overlap.validate import validate
from overlap.verify import step_facts, verify
from recompute import ConfigError, Keep, RecomputeConfig
from tests.overlap.hiding import HIDDEN, race_free, with_mtp
from tests.overlap.hiding import step_plans as plans_of
from tests.overlap.programs import differences, dummy_program, label, result_of, side_of, tiny_chunk, tiny_feeds
from tests.overlap.test_selective import feeds

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none()
PLAIN = get_order("plain")


def sides(kinds: str, lead: int, config: RecomputeConfig = none, **shape: Any) -> dict[int, Side]:
    side = side_of(dummy_program(kinds, **shape), config)
    return {FORWARD_SIDE: side, LEAD_SIDE: leading(side, lead)}


def scheduled(kinds: str, lead: int, order: Order = PLAIN, **shape: Any) -> Schedule:
    both = sides(kinds, lead, **shape)
    return make_schedule(order, both[FORWARD_SIDE], None, delayed=False, lead=both[LEAD_SIDE])


TURNS = [
    (
        "MM",
        1,
        "F1.embed F1.0.attn F1.0.dispatch F1.0.experts F1.0.combine F1.0.post F1.1.attn F1.1.dispatch "
        "F2.embed F2.0.attn F2.0.dispatch F1.1.experts F1.1.combine F2.0.experts F2.0.combine F1.1.post F1.head "
        "F2.0.post",
    ),
    (
        "MM",
        2,
        "F1.embed F1.0.attn F1.0.dispatch F2.embed F2.0.attn F2.0.dispatch F1.0.experts F1.0.combine "
        "F2.0.experts F2.0.combine F1.0.post F1.1.attn F1.1.dispatch F2.0.post F2.1.attn F2.1.dispatch "
        "F1.1.experts F1.1.combine F2.1.experts F2.1.combine F1.1.post F1.head F2.1.post",
    ),
    # a dense layer fills one gap; the last of the lead's comes behind the last transfer
    (
        "DM",
        1,
        "F1.embed F1.0.attn F1.0.experts F1.0.post F1.1.attn F1.1.dispatch F1.1.experts F1.1.combine "
        "F2.embed F2.0.attn F2.0.experts F2.0.post F1.1.post F1.head",
    ),
    (
        "DM",
        2,
        "F1.embed F1.0.attn F1.0.experts F1.0.post F2.embed F2.0.attn F2.0.experts F2.0.post F1.1.attn F1.1.dispatch "
        "F2.1.attn F2.1.dispatch F1.1.experts F1.1.combine F2.1.experts F2.1.combine F1.1.post F1.head F2.1.post",
    ),
    ("D", 1, "F1.embed F1.0.attn F1.0.experts F1.0.post F2.embed F2.0.attn F2.0.experts F2.0.post F1.head"),
]


@pytest.mark.parametrize(("kinds", "lead", "expected"), TURNS)
def test_two_forwards_take_turns_at_transfers(kinds: str, lead: int, expected: str) -> None:
    assert format_schedule(scheduled(kinds, lead)) == expected


def test_transfers_in_a_row_are_one_turn() -> None:
    """Between them nothing would compute."""
    program = dummy_program("M")
    front, lead = (parse_schedule(" ".join(f"N{n}.0.{stage}" for stage in ("dispatch", "combine"))) for n in (1, 2))
    assert interleave(front, lead, program) == (*front, *lead)


@given(st.sampled_from(ORDER_NAMES), st.text("MD", min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_both_keep_their_order_and_the_first_is_ahead(order: str, kinds: str, lead: int, shared: bool) -> None:
    lead = min(lead, len(kinds))
    slots = scheduled(kinds, lead, get_order(order), shared=shared)
    front, behind = ([slot.key for slot in slots if slot.microbatch == side] for side in (FORWARD_SIDE, LEAD_SIDE))
    assert front[: len(behind)] == behind
    assert len(front) > len(behind)
    places = {slot: place for place, slot in enumerate(slots)}
    assert all(places[slot] > places[replace(slot, microbatch=FORWARD_SIDE)] for slot in slots if slot.microbatch == 2)


@given(st.sampled_from(ORDER_NAMES), st.text("MD", min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2),
       st.sampled_from([none, uniform(1), uniform(2), block(1), uniform(1, keep=Keep.HOST)]), st.integers(2, 4),
       st.booleans())  # fmt: skip
def test_a_step_has_the_same_slots(
    order: str, kinds: str, lead: int, mtp: int, config: RecomputeConfig, microbatches: int, delayed: bool
) -> None:
    """Every slot of every microbatch once, however the second forward is cut; all but the first two plans the same."""
    program = with_mtp(dummy_program(kinds), min(mtp, len(kinds)))
    lead = min(lead, len(kinds))
    usual, ahead = (
        plans_of(Planner(program, get_order(order), delayed=delayed, lead=own), [config] * microbatches)
        for own in (0, lead)
    )
    assert _slots(ahead) == _slots(usual)
    assert set(_slots(ahead).values()) == {1}
    assert ahead[2:] == usual[2:]
    early = Counter(
        label(i.slot.key) for i in ahead[0][0].issues if i.slot.microbatch == LEAD_SIDE and i.slot.op != "S"
    )
    side = side_of(program)
    assert early == Counter(label(key) for key in leading(side, lead).passes)
    assert not leading(side, lead).passes & remaining(side, lead).passes
    assert leading(side, lead).passes | remaining(side, lead).passes == side.passes == frozenset(program.by_key)


def _slots(plans: list[StepPlan]) -> Counter[str]:
    return Counter(
        str(replace(issue.slot, microbatch=numbers[issue.slot.microbatch]))
        for plan, numbers in plans
        for issue in plan.issues
    )


def test_what_a_lead_leaves() -> None:
    side = remaining(side_of(dummy_program("MMM", tied=True), uniform(1)), 2)
    survivors = frozenset({("embedded", 0), ("0.out", 0), ("0.routing", 0), ("1.out", 0), ("2.routing", 0)})
    # what the third layer reads, what head reads of before and of the feeds; not what is still to be written
    read = {("1.out", 0), ("weight.tied", 0), ("target", 0)}
    assert handed_over(side, survivors) == survivors - {("2.routing", 0)} | read


def test_plans_hand_over_exactly_what_the_rest_reads() -> None:
    program = dummy_program("MMM", shared=True)
    for config in (none, uniform(1), uniform(2), uniform(1, keep=Keep.HOST)):
        planner = Planner(program, PLAIN, delayed=False, lead=2)
        (first, _), (second, _), (third, _) = plans_of(planner, [config] * 2)
        written = {key for issue in second.issues if issue.slot.microbatch == FORWARD_SIDE for key in issue.writes}
        survives = third.imports.get(BACKWARD_SIDE, frozenset())
        assert first.exports[LEAD_SIDE] == second.imports[FORWARD_SIDE] | (survives - written)
        assert second.imports[FORWARD_SIDE] >= {("1.out", 0), ("target", 0)}


@pytest.mark.parametrize("lead", [1, 2, 3])
@pytest.mark.parametrize("config", [none, uniform(2, replay=HIDDEN), uniform(1, keep=Keep.HOST)])
def test_nothing_races(config: RecomputeConfig, lead: int) -> None:
    """An input that left in the lead is let go by the rest of the forward, which waits for that."""
    orders = [get_order("multi_queue", HIDDEN), *([] if config.replay is HIDDEN else [PLAIN])]
    for kinds, order in product(("MMM", "DMD"), orders):
        race_free(Planner(dummy_program(kinds), order, delayed=True, lead=lead), [config] * 3)


@pytest.mark.parametrize(
    ("lead", "value"), [(-1, "-1"), (4, "4"), (True, "True"), (1.0, "1.0"), ("1", "'1'")]
)  # fmt: skip
def test_a_lead_that_the_layers_do_not_have_is_refused(lead: Any, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelChunk(tiny_chunk("MMD").module, lead=lead)
    assert str(error.value) == f"lead={value}: must be an integer from 0 to the layers of the program (3)"
    check_lead(3, 3)
    with pytest.raises(ConfigError, match="lead=1: has no effect on a step of one microbatch"):
        check_second(1, 1)
    check_second(0, 1)
    check_second(1, 2)


BROKEN = [
    ("N2.0.dispatch", "", "N2.0.experts reads '0.sent', which no earlier slot writes"),
    ("N2.0.post", "", "microbatch 2: forward of 0.post is missing"),
    ("", "N2.1.attn", "N2.1.attn belongs to the part of its forward that another plan runs"),
]


@pytest.mark.parametrize(("drop", "put", "message"), BROKEN)
def test_a_cut_forward_that_is_not_the_cut_is_refused(drop: str, put: str, message: str) -> None:
    both = sides("MM", 1, uniform(1))
    slots = make_schedule(PLAIN, both[FORWARD_SIDE], None, delayed=False, lead=both[LEAD_SIDE])
    broken = (*(slot for slot in slots if str(slot) != drop), *parse_schedule(put))
    with pytest.raises(ScheduleError, match=message):
        validate(broken, both)


def test_the_rest_of_a_forward_is_checked_too() -> None:
    side = remaining(side_of(dummy_program("MM"), uniform(1)), 1)
    slots = make_schedule(PLAIN, side, None, delayed=False)
    assert format_schedule(slots).split()[0] == "N1.1.attn"
    for broken, message in (
        ((*parse_schedule("N1.0.post"), *slots), "N1.0.post belongs to the part"),
        (slots[:-1], "forward of head is missing"),
        (slots[1:], "N1.1.dispatch reads '1.tokens', which no earlier slot writes"),
    ):
        with pytest.raises(ScheduleError, match=message):
            validate(broken, {FORWARD_SIDE: side})


def test_state_that_changes_in_place_sees_microbatches_in_order() -> None:
    program = dummy_program("MM")
    held = tuple(replace(s, state=(object(),)) if s.key == (0, "experts") else s for s in program.stages)
    side = side_of(replace(program, stages=held))
    both = {FORWARD_SIDE: side, LEAD_SIDE: leading(side, 1)}
    slots = make_schedule(PLAIN, side, None, delayed=False, lead=both[LEAD_SIDE])
    ahead = tuple(sorted(slots, key=lambda slot: -slot.microbatch))
    with pytest.raises(ScheduleError, match=r"F2\.0\.experts changes state in place before 0\.experts of"):
        validate(ahead, both)
    validate(ahead, {n: replace(one, program=program) for n, one in both.items()})


STEPS = [
    ("MMM", none, {"dropout": 0.3, "stateful": True}),
    ("MMM", uniform(1), {"dropout": 0.3, "stateful": True}),
    ("MDM", uniform(2, replay=HIDDEN), {"dropout": 0.3, "tied": True}),
    ("MMM", block(2), {"shared": True, "plain_post": True}),
    ("DDM", uniform(1, replay=HIDDEN, keep=Keep.HOST), {"stateful": True}),
]


@pytest.mark.parametrize("lead", [1, 2, 3])
@pytest.mark.parametrize(("kinds", "config", "shape"), STEPS)
def test_no_bit_changes(lead: int, kinds: str, config: RecomputeConfig, shape: dict[str, Any]) -> None:
    usual, expected, found = (
        tiny_chunk(kinds, shape=shape, recompute=config, delay_wgrad=lead == 2, lead=own) for own in (0, lead, lead)
    )
    reference_step(expected, tiny_feeds(3))
    counters = [SegmentCounter(chunk, 3) for chunk in (usual, found)]
    for chunk, counter in zip((usual, found), counters, strict=True):
        train_step(chunk, tiny_feeds(3), observers=(counter,))
    assert differences(result_of(expected), result_of(found)) == []
    assert counters[0].peak == counters[1].peak
    assert step_facts(found, 3) == step_facts(usual, 3)


def decoder(config: RecomputeConfig, lead: int, *, delay: bool = False, **shape: Any) -> ModelChunk:
    model = ModelConfig(vocab=17, **{"layers": 2, "hidden": 16, **shape})
    return ModelChunk(Decoder(model), recompute=config, delay_wgrad=delay, lead=lead)


REAL = [
    (
        uniform(1, replay=HIDDEN),
        2,
        {"layers": 1, "mtp": 1, "mhc": 2, "mhc_iterations": 1, "dropout": 0.1, "delay": True},
    ),
    (uniform(2), 1, {"dtype": "bfloat16", "tied": True}),
    (RecomputeConfig.selective("core_attn", "experts", "layernorm"), 2, {"jitter": 0.1, "delay": True}),
    (none, 2, {"dtype": "bfloat16", "mtp": 1, "dropout": 0.1}),
]


@pytest.mark.parametrize(("config", "lead", "shape"), REAL)
def test_no_bit_of_a_decoder_changes(config: RecomputeConfig, lead: int, shape: dict[str, Any]) -> None:
    verdict = verify(decoder(config, lead, **shape), [feeds(3)])
    assert verdict.equal, verdict


def test_microbatches_with_configs_of_their_own() -> None:
    configs = [uniform(1), none, uniform(2, replay=HIDDEN), uniform(1, keep=Keep.HOST)]
    for chosen in (configs, configs[::-1], [configs[3], configs[0], none, none]):
        expected, found = (tiny_chunk("MMM", recompute=chosen, lead=2) for _ in range(2))
        reference_step(expected, tiny_feeds(4))
        train_step(found, tiny_feeds(4))
        assert differences(result_of(expected), result_of(found)) == []


def test_one_microbatch_has_no_second() -> None:
    usual, found = (tiny_chunk("MM", recompute=uniform(1), lead=lead) for lead in (0, 2))
    slots = [
        [(str(i.slot), i.frees) for plan, _ in step_plans(chunk, 1) for i in plan.issues] for chunk in (usual, found)
    ]
    assert slots[0] == slots[1]
    for chunk in (usual, found):
        train_step(chunk, tiny_feeds(1))
    assert differences(result_of(usual), result_of(found)) == []


def test_other_steps_know_no_lead() -> None:
    """Neither layers run whole nor a forward alone leave transfers that a lead could hide."""
    usual, found = (tiny_chunk("MM", recompute=uniform(1), lead=lead) for lead in (0, 2))
    for chunk in (usual, found):
        contiguous_step(chunk, tiny_feeds(2))
    assert differences(result_of(usual), result_of(found)) == []
    with torch.no_grad():
        assert forward_only(usual, tiny_feeds(2)) == forward_only(found, tiny_feeds(2))


def test_it_is_part_of_what_ranks_agree_on() -> None:
    assert tiny_chunk("MM", lead=2).settings(2)["lead"] == 2


class Mixed(Engine):
    """Control: the second microbatch goes on from where the first one was at the cut."""

    first: Any = None

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        if (issue.slot.op, issue.slot.key) == (Op.NO_GRAD, (1, "attn")):
            if owner.number == 0:
                self.first = owner.values["0.out", 0]
            elif owner.number == 1:
                owner.values["0.out", 0] = self.first
        super().issue(issue, owner)


def test_a_wrong_hand_over_is_seen() -> None:
    chunk = tiny_chunk("MMM", recompute=uniform(1), lead=1)
    assert verify(chunk, [tiny_feeds(3)]).equal
    verdict = verify(chunk, [tiny_feeds(3)], engine_type=Mixed)
    assert not verdict.loss_equal
    assert verdict.gradients.different


def test_values_at_the_cut_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a lead leaves what backward reads, and no more."""
    monkeypatch.setattr("overlap.plan.handed_over", lambda side, survivors: survivors)
    with pytest.raises(KeyError):
        train_step(tiny_chunk("MMM", recompute=none, lead=1), tiny_feeds(2))


def test_parts_of_two_microbatches_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the whole forward is the second microbatch's, the lead the first one's."""

    def swapped(planner: Planner, *given: Any) -> list[StepPlan]:
        (first, _), *rest = planned(planner, *given)
        return [(first, {FORWARD_SIDE: 1, LEAD_SIDE: 0}), *rest]

    planned = Planner.step
    monkeypatch.setattr(Planner, "step", swapped)
    with pytest.raises(KeyError):
        train_step(tiny_chunk("MMM", recompute=none, lead=1), tiny_feeds(2))
