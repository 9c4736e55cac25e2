"""What ranks issue: the same on all of them, whatever delays them, and no more than the plan lists."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.engine import MicrobatchState
from overlap.errors import RanksDisagree
from overlap.lower import Issue
from overlap.model import Router
from overlap.parallel.collective_log import CollectiveLog
from overlap.training.trainer import Trainer
from recompute import RecomputeConfig
from tests.distributed.chunks import HIDDEN, chunk_in, feeds_of, gradients, join
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.distributed
MICROBATCHES = 3
LAYERS = 4


class Slow:
    """Sleeps before some slots."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if self.random.random() < 0.15:
            time.sleep(self.random.random() * 0.02)

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        return


def log_of_a_step(rule: RecomputeConfig, delayed: bool) -> list[str]:
    world = join(2, 2)
    # not the world's, which is compared and cleared after the step
    log = CollectiveLog()
    chunk = chunk_in(world, rule, log, layers=LAYERS)
    chunk.checked = True
    observers = (log, Slow()) if delayed and world.rank == 1 else (log,)
    train_step(chunk, feeds_of(world.rank, MICROBATCHES), observers=observers)
    return log.entries


@pytest.mark.parametrize(
    ("rule", "segments"),
    [(HIDDEN, LAYERS), (RecomputeConfig.uniform(2), 2), (RecomputeConfig.block(3), 3)],
)
def test_logs_are_equal_and_hold_what_the_plan_lists(ranks: RankPool, rule: RecomputeConfig, segments: int) -> None:
    """Row 60: equal under delays; a replay adds k dispatches and k-1 combines for a segment of k layers."""
    first, second = ranks(2, log_of_a_step, rule, True, limit=30.0)
    assert first == second
    replayed = [entry.split()[2] for entry in first if entry.startswith("R")]
    layers = 3 if rule.method == "block" else LAYERS
    # a dispatch is two collectives: tokens and weights
    assert len(replayed) == MICROBATCHES * (2 * layers + layers - segments)
    assert replayed.count("combine") == MICROBATCHES * (layers - segments)
    # row 17: splits are found out in the first pass, once per microbatch and layer, and never again
    counts = [entry for entry in first if " counts " in entry]
    assert len(counts) == MICROBATCHES * LAYERS
    assert all(entry[0] in "FN" for entry in counts)


class ByLength:
    """Microbatches of 8 tokens go to the first rank's experts, others to the second's."""

    def __call__(self, scores: Tensor, k: int) -> Tensor:
        first = 0 if scores.shape[0] == 8 else 2
        return torch.arange(first, first + k).expand(scores.shape[0], k)


def all_to_one_rank(swap: bool) -> dict[str, Any]:
    """Gradients of both steps, where one rank has no row, or the empty rank swaps with the microbatch."""

    def made() -> ModelChunk:
        chunk = chunk_in(world)
        for module in chunk.modules():
            if isinstance(module, Router):
                module.select = ByLength()
        return chunk

    world = join(2, 2)
    feeds = feeds_of(world.rank, 1) + feeds_of(world.rank, 1, 6 if swap else 8)
    found, expected = made(), made()
    train_step(found, feeds)
    reference_step(expected, feeds)
    return {"found": gradients(found), "expected": gradients(expected)}


@pytest.mark.parametrize("swap", [False, True])
def test_a_rank_without_tokens_goes_on(ranks: RankPool, swap: bool) -> None:
    """Row 42: no hang; an idle rank's experts have gradients of exact zeros."""
    answers = ranks(2, all_to_one_rank, swap, limit=30.0)
    for rank, answer in enumerate(answers):
        found, expected = answer["found"], answer["expected"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        routed = [gradient for name, gradient in found.items() if ".experts." in name]
        assert len(routed) == 4
        assert all(bool(gradient.any()) == (swap or rank == 0) for gradient in routed)


class OneMore:
    """Rank 1 notes a collective that rank 0 does not issue, in the second step."""

    def __init__(self, chunk: ModelChunk) -> None:
        self.chunk = chunk

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        return

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        world = self.chunk.world
        if world.rank == 1 and self.chunk.steps_done == 1 and str(issue.slot) == "B0.1.combine" and owner.number == 0:
            world.collectives.record("all_reduce", "planted", torch.empty(1))


def planted_in_the_second_step() -> list[str]:
    chunk = chunk_in(join(2, 2, debug=True))
    outcomes = []
    for _ in range(2):
        try:
            train_step(chunk, feeds_of(0, 1), observers=(OneMore(chunk),))
            outcomes.append("equal")
        except RanksDisagree as error:
            outcomes.append(str(error))
    return outcomes


def test_debug_mode_sees_a_step_that_differs(ranks: RankPool) -> None:
    first, second = ranks(2, planted_in_the_second_step)
    assert first == second
    assert first[0] == "equal"
    assert "rank 1: entry" in first[1]
    assert "planted" in first[1]


def contiguous_equals_reference() -> bool:
    world = join(2, 2)
    rule = RecomputeConfig.uniform(2)
    sides = [chunk_in(world, rule, layers=3) for _ in range(2)]
    feeds = feeds_of(world.rank, 2, (8, 10)[world.rank])
    for step, side in zip((contiguous_step, reference_step), sides, strict=True):
        step(side, feeds)
    found, expected = map(gradients, sides)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_plain_checkpointing_runs_over_ranks_too(ranks: RankPool) -> None:
    assert ranks(2, contiguous_equals_reference) == [True, True]


def mean_losses() -> tuple[float, float, float]:
    """What the trainer reports, the mean that this rank's own losses have, and tokens counted."""
    world = join(2, 2)
    own = train_step(chunk_in(world), feeds_of(world.rank, 2))
    trainer = Trainer(chunk_in(world), lambda step: feeds_of(world.rank, 2))
    report = trainer.step()
    tokens = report.tokens_per_second * report.milliseconds / 1e3
    return report.loss, sum(item["loss"].item() for item in own) / 2, tokens


def test_the_trainer_reports_the_mean_over_ranks(ranks: RankPool) -> None:
    (first, own, tokens), (second, other, _) = ranks(2, mean_losses)
    assert first == second
    assert first == pytest.approx((own + other) / 2, rel=1e-6)
    assert own != pytest.approx(other, rel=1e-4)
    assert tokens == pytest.approx(2 * 2 * 8)
