"""The walk over the plans gives what a real step holds, to the byte, at every slot border."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlap.lower import Plan
from overlap.memory import (
    Bin,
    Usage,
    fake_chunk,
    footprints_of,
    gaps_of,
    measure_step,
    predict,
    predict_step,
    take_footprint,
)
from overlap.memory.facts import Footprint
from overlap.memory.predict import Walk
from overlap.plan import StepPlan
from overlap.step import step_plans
from recompute.config import Replay
from tests.memory.compare import assert_exact, assert_same, block, decoder, first_pass, none, tokens, uniform
from tests.overlap.programs import tiny_chunk, tiny_feeds

CONFIGS = (none, uniform(1), uniform(2), uniform(3), uniform(8), block(3))
HIDDEN = uniform(1, replay=Replay.HIDDEN)
TINY: tuple[dict[str, object], ...] = (
    {"shared": True, "stateful": True},
    {"tied": True, "plain_post": True, "dropout": 0.1},
)


@cache
def tiny_footprint(shape: int) -> Footprint:
    """Taken once; it holds for every schedule."""
    with fake_chunk(lambda: tiny_chunk("DMM", shape=TINY[shape])) as chunk:
        return take_footprint(chunk, tiny_feeds(1)[0])


# Only an order with R steps hides a replay.
@pytest.mark.parametrize(
    ("recompute", "order"),
    [*((config, order) for config in CONFIGS for order in ("plain", "multi_queue")), (HIDDEN, "multi_queue")],
    ids=str,
)
@pytest.mark.parametrize("shape", range(len(TINY)))
def test_small_programs(recompute, order, shape) -> None:
    delay_wgrad = (order == "plain") == (shape == 0)
    chunk = tiny_chunk("DMM", shape=TINY[shape], recompute=recompute, order=order, delay_wgrad=delay_wgrad)
    assert_same(measure_step(chunk, tiny_feeds(2)).usage, predict_step(chunk, [tiny_footprint(shape)] * 2))


SHAPES: tuple[dict[str, object], ...] = (
    {"layers": 3, "dense_layers": 1, "dropout": 0.1, "tied": True},
    {"layers": 2, "attention": "gqa", "kv_rank": 16, "dtype": "bfloat16", "topk": 1, "shared_width": 0},
    {"layers": 1, "mtp": 1, "mhc": 2, "mhc_iterations": 2, "tied": True},
)


@cache
def footprint(shape: int) -> Footprint:
    """Taken once; it holds for every schedule."""
    with fake_chunk(lambda: decoder(**SHAPES[shape])) as chunk:
        return take_footprint(chunk, tokens(1)[0])


@settings(max_examples=10)
@given(data=st.data())
def test_any_schedule_from_one_dry_run(data) -> None:
    shape, microbatches = data.draw(st.integers(0, len(SHAPES) - 1)), data.draw(st.integers(1, 4))
    order = data.draw(st.sampled_from(["plain", "multi_queue"]))
    one = st.sampled_from([*CONFIGS, HIDDEN] if order == "multi_queue" else CONFIGS)
    chunk = decoder(
        data.draw(one | st.lists(one, min_size=microbatches, max_size=microbatches)),
        order=order,
        delay_wgrad=data.draw(st.booleans()),
        lead=data.draw(st.integers(0, 2 if shape != 1 else 1)),
        **SHAPES[shape],
    )
    predicted = predict_step(chunk, [footprint(shape)] * microbatches)
    assert_same(measure_step(chunk, tokens(microbatches)).usage, predicted)


@pytest.mark.parametrize(("lead", "kept"), [(0, 0), (1, 2), (2, 3), (3, 3)])
def test_a_lead_keeps_its_inputs_and_where_it_stops(lead, kept) -> None:
    """Hidden states of the second microbatch between the first two plans; what head reads is no segment input."""
    chunk = decoder(uniform(1), lead=lead, dense_layers=3)
    curve = measure_step(chunk, tokens(4)).usage.curve
    ends = [*accumulate(len(plan.issues) for plan, _ in step_plans(chunk, 4))][:-1]
    inputs = [curve[end - 1].bytes[Bin.SEGMENT_INPUTS] // (2 * 6 * 16 * 4) for end in ends]
    assert inputs == [3 + kept, 3, 3, 3]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Settings of a decoder, of its recompute and of the step."""
    layers = draw(st.integers(0, 3))
    mla = draw(st.booleans())
    microbatches = draw(st.integers(1, 3))
    return {
        "recompute": draw(st.sampled_from(CONFIGS)),
        "delay_wgrad": draw(st.booleans()),
        "layers": layers,
        "dense_layers": draw(st.integers(0, layers)),
        "attention": "mla" if mla else "gqa",
        "kv_rank": 8 if mla else 16,
        "q_rank": draw(st.sampled_from([0, 8])) if mla else 0,
        "topk": draw(st.integers(1, 2)),
        "shared_width": draw(st.sampled_from([0, 24])),
        "score": draw(st.sampled_from(["sigmoid", "softmax"])),
        "aux_coefficient": draw(st.sampled_from([0.0, 0.01])),
        "jitter": draw(st.sampled_from([0.0, 0.1])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "tied": draw(st.booleans()),
        "per_token_loss": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float64"])),
        "sizes": draw(st.lists(st.sampled_from([(1, 4), (3, 6)]), min_size=microbatches, max_size=microbatches)),
    }


@settings(max_examples=3)
@example(case={"recompute": uniform(1), "layers": 1, "per_token_loss": True, "sizes": [(2, 6)] * 2})
@example(case={"recompute": uniform(1), "layers": 2, "tied": True, "dtype": "float64", "sizes": [(2, 6)] * 2})
@example(case={"recompute": [none, block(1)], "layers": 2, "dtype": "bfloat16", "sizes": [(1, 4), (3, 6)]})
@given(case=cases())
def test_any_model(case) -> None:
    config = {name: value for name, value in case.items() if name != "sizes"}
    feeds = [tokens(1, batch, seq)[0] for batch, seq in case["sizes"]]
    assert_exact(lambda: decoder(**config), feeds)


@pytest.mark.parametrize("frozen", ["embedding", "attn", "experts", "norm"])
def test_frozen_parameters(frozen) -> None:
    """R6: less is tracked, so less is held."""

    def build():
        chunk = decoder(uniform(2), delay_wgrad=True, layers=2)
        for name, parameter in chunk.module.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return chunk

    assert_exact(build, tokens(2))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_is_part_of_the_prediction() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_exact(lambda: decoder(uniform(1), layers=2), tokens(2))


def test_prediction_runs_nothing_for_real() -> None:
    """A model that would take 80 GB of weights and minutes of arithmetic."""

    def build():
        big = {"hidden": 8192, "heads": 64, "experts": 64, "topk": 8, "expert_width": 8192, "max_seq": 4096}
        return decoder(uniform(1), layers=2, **big)

    bins = predict(build, tokens(1, batch=1, seq=4096)).usage.peaks.bins
    assert bins[Bin.SEGMENT_INPUTS] == 2 * 4096 * 8192 * 4
    assert bins[Bin.PINNED_ROUTING] == 2 * (8 * (4096 * 8 + 64) + 4 * (3 * 4096 * 8 + 64))


def test_no_microbatch_shape_is_taken_for_another() -> None:
    with fake_chunk(lambda: decoder(layers=1)) as chunk:
        found = footprints_of(chunk, [*tokens(2), *tokens(1, batch=3), *tokens(1)])
    assert found[0] is found[1] is found[3]
    assert found[2] is not found[0]


def walk_late(late: Sequence[tuple[int, int]], feeds) -> Usage:
    """Predict with the frees of some issues, (plan, issue), moved one slot later."""
    with fake_chunk(lambda: decoder(uniform(1), layers=2)) as chunk:
        plans = [
            (_moved(plan, [issue for where, issue in late if where == number]), numbers)
            for number, (plan, numbers) in enumerate(step_plans(chunk, len(feeds)))
        ]
        return Walk(footprints_of(chunk, feeds), gaps_of(chunk, len(feeds)), delayed=False).run(plans)


def _moved(plan: Plan, late: Sequence[int]) -> Plan:
    issues = list(plan.issues)
    for place in sorted(late, reverse=True):
        first, second = issues[place : place + 2]
        # Frees go by microbatch: the next slot must be one of the same.
        assert first.slot.microbatch == second.slot.microbatch
        issues[place : place + 2] = [replace(first, frees=()), replace(second, frees=first.frees + second.frees)]
    return replace(plan, issues=tuple(issues))


def _movable(plans: Sequence[StepPlan]) -> Iterator[tuple[int, int]]:
    for number, (plan, _) in enumerate(plans):
        for place, (first, second) in enumerate(pairwise(plan.issues)):
            if first.frees and first.slot.microbatch == second.slot.microbatch:
                yield number, place


def test_a_free_that_comes_one_slot_late_shows() -> None:
    """Negative control."""
    feeds = tokens(2)
    chunk = decoder(uniform(1), layers=2)
    plans = step_plans(chunk, 2)
    movable = list(_movable(plans))
    measured = measure_step(chunk, feeds).usage

    def widest(usage: Usage) -> int:
        return max(border[Bin.REST] for border in first_pass(usage)[:6])

    assert walk_late([], feeds) == measured
    assert walk_late(movable, feeds) != measured
    # The shared expert's input is then still there when the experts end, where a layer's first pass is widest.
    shared = next((n, i) for n, i in movable if str(plans[n][0].issues[i].slot) == "N1.0.shared")
    assert widest(walk_late([shared], feeds)) == widest(measured) + 2 * 6 * 16 * 4
