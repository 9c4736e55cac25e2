"""The walk over the plans gives what a real step holds, to the byte, at every slot border."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlap.ir import Op
from overlap.lower import Plan
from overlap.memory import Bin, Usage, fake_chunk, footprints_of, gaps_of, measure_step, predict
from overlap.memory.predict import Walk
from overlap.model import ModelConfig
from overlap.step import StepPlan, step_plans
from tests.memory.compare import assert_exact, block, decoder, none, tokens, uniform
from tests.overlap.programs import tiny_chunk, tiny_feeds

CONFIGS = (none, uniform(1), uniform(2), uniform(3), uniform(8), block(3))


@pytest.mark.parametrize("recompute", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("order", "delay_wgrad", "shape"),
    [
        ("multi_queue", False, {"shared": True, "stateful": True}),
        ("multi_queue", True, {"tied": True}),
        ("plain", False, {"tied": True, "plain_post": True, "dropout": 0.1}),
        ("plain", True, {"stateful": True}),
    ],
)
def test_small_programs(recompute, order, delay_wgrad, shape) -> None:
    assert_exact(
        lambda: tiny_chunk("DMDM", shape=shape, recompute=recompute, order=order, delay_wgrad=delay_wgrad),
        tiny_feeds(2),
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Settings of a decoder, of its recompute and of the step."""
    layers = draw(st.integers(0, 4))
    mla = draw(st.booleans())
    microbatches = draw(st.integers(1, 4))
    one = st.sampled_from(CONFIGS)
    return {
        "recompute": draw(one | st.lists(one, min_size=microbatches, max_size=microbatches)),
        "order": draw(st.sampled_from(["plain", "multi_queue"])),
        "delay_wgrad": draw(st.booleans()),
        "layers": layers,
        "dense_layers": draw(st.integers(0, layers)),
        "attention": "mla" if mla else "gqa",
        "kv_rank": 8 if mla else ModelConfig.__dataclass_fields__["kv_rank"].default,
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


@settings(max_examples=10)
@example(case={"recompute": uniform(1), "layers": 4, "tied": True, "delay_wgrad": True, "sizes": [(2, 6)] * 2})
@example(case={"recompute": [none, block(3)], "dense_layers": 1, "dtype": "bfloat16", "sizes": [(1, 4), (3, 6)]})
@given(case=cases())
def test_measured_is_predicted(case) -> None:
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
    assert bins[Bin.PINNED_ROUTING] == 2 * 8 * (3 * 4096 * 8 + 64)


def test_no_microbatch_shape_is_taken_for_another() -> None:
    with fake_chunk(lambda: decoder(layers=1)) as chunk:
        found = footprints_of(chunk, [*tokens(2), *tokens(1, batch=3), *tokens(1)])
    assert found[0] is found[1] is found[3]
    assert found[2] is not found[0]


def walk_late(late: Sequence[tuple[int, int]], feeds) -> Usage:
    """Predict with the frees of some issues, (plan, issue), moved one slot later."""
    with fake_chunk(lambda: decoder(uniform(1), layers=2)) as chunk:
        plans = [
            (_moved(plan, [issue for where, issue in late if where == number]), forward, backward)
            for number, (plan, forward, backward) in enumerate(step_plans(chunk, len(feeds)))
        ]
        return Walk(footprints_of(chunk, feeds), gaps_of(chunk, len(feeds))).run(plans)


def _moved(plan: Plan, late: Sequence[int]) -> Plan:
    issues = list(plan.issues)
    for place in sorted(late, reverse=True):
        first, second = issues[place : place + 2]
        # Frees go by microbatch: the next slot must be one of the same.
        assert first.slot.microbatch == second.slot.microbatch
        issues[place : place + 2] = [replace(first, frees=()), replace(second, frees=first.frees + second.frees)]
    return replace(plan, issues=tuple(issues))


def _movable(plans: Sequence[StepPlan]) -> Iterator[tuple[int, int]]:
    for number, (plan, _, _) in enumerate(plans):
        for place, (first, second) in enumerate(pairwise(plan.issues)):
            if first.frees and first.slot.microbatch == second.slot.microbatch and first.slot.op is not Op.BACKWARD:
                yield number, place


def test_a_free_that_comes_one_slot_late_shows() -> None:
    """Negative control: each single one changes the curve, all together the peaks."""
    feeds = tokens(2)
    chunk = decoder(uniform(1), layers=2)
    movable = list(_movable(step_plans(chunk, 2)))
    measured = measure_step(chunk, feeds).usage
    assert walk_late([], feeds) == measured
    assert walk_late(movable, feeds).as_json() != measured.as_json()
    experts = next(
        (number, place)
        for number, place in movable
        if str(step_plans(chunk, 2)[number][0].issues[place].slot) == "N1.0.experts"
    )
    assert walk_late([experts], feeds) != measured
