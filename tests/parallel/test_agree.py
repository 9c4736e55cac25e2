"""Ranks that differ are told so, all of them and in time; ranks that issued different collectives too."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap import ModelChunk, PerMicrobatch, PerToken, forward_only, get_order, train_step
from overlap.dispatch.all_to_all import AllToAll
from overlap.errors import RanksDisagree
from overlap.model import Decoder, ModelConfig
from overlap.parallel.agree import agree, compare_collectives, gather
from overlap.parallel.attach import DataSettings
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.scale import PerTokenOfRanks
from overlap.parallel.work_lanes import WorkLanes
from overlap.parallel.works import Works
from overlap.parallel.world import SOLO, World, open_world
from overlap.scale import LossScale
from overlap.verify import compare
from recompute import RecomputeConfig, Replay
from recompute.errors import ConfigError
from tests.distributed.ranks import RankPool, collect, start_ranks
from tests.parallel.models import feeds_of, gradients, parallel_chunk, world_of

pytestmark = pytest.mark.distributed
TINY: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "expert_width": 8, "shared_width": 8, "vocab": 32}


def join(size: int = 2, seconds: float = 20.0, debug: bool = False) -> World:
    return open_world(ParallelLayout(world_size=size, ep=2), "cpu", timedelta(seconds=seconds), debug=debug)


def scale_of(world: World, differs: bool) -> LossScale:
    """One that asks the other ranks for their tokens, or not."""
    return PerTokenOfRanks(world) if differs else PerToken()


def planted(setting: str) -> dict[str, Any]:
    """A chunk whose setting differs on rank 1; what every rank saw."""
    world = join()
    differs = world.rank == 1
    shape = {**TINY, **({"layers": 3} if differs and setting == "decoder_layers" else {})}
    shape.update({"mtp": 1} if differs and setting == "mtp_layers" else {})
    shape.update({"capacity": 6} if differs and setting == "capacity" else {})
    shape.update({"per_token_loss": True} if setting == "loss_scale" else {})
    shape.update({"dtype": "bfloat16"} if differs and setting == "dtype" else {})
    works = Works()
    model = Decoder(ModelConfig(**shape), transport=AllToAll(world.ep_group, works, world.collectives))
    if differs and setting == "frozen_parameters":
        model.embedding.requires_grad_(False)
    rule = RecomputeConfig.uniform(2 if differs and setting == "segments" else 1)
    if differs and setting == "replay":
        rule = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
    chunk = ModelChunk(
        model,
        recompute=rule,
        order=get_order("single_queue" if differs and setting == "order" else "multi_queue", rule.replay),
        delay_wgrad=differs and setting == "delay_wgrad",
        seed=int(differs and setting == "seed"),
        loss_scale=scale_of(world, differs) if setting == "loss_scale" else PerMicrobatch(),
        lanes=WorkLanes(works),
        world=world,
    )
    count = 3 if differs and setting == "microbatches" else 2
    tokens = torch.randint(32, (count, 1, 9))
    feeds = [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens]
    begin = time.monotonic()
    try:
        train_step(chunk, feeds)
    except ConfigError as error:
        return {"field": error.field, "value": error.value, "seconds": time.monotonic() - begin}
    return {"field": None, "seconds": time.monotonic() - begin}


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("decoder_layers", {0: 2, 1: 3}),
        ("mtp_layers", {0: 0, 1: 1}),
        ("dtype", {0: ["torch.float32"], 1: ["torch.bfloat16"]}),
        ("frozen_parameters", {0: "entry 0: none", 1: "entry 0: embedding"}),
        ("segments", {0: "entry 0: [(0,), (1,)]", 1: "entry 0: [(0, 1)]"}),
        ("replay", {0: "entry 0: just_in_time", 1: "entry 0: hidden"}),
        ("order", None),
        ("delay_wgrad", {0: False, 1: True}),
        ("seed", {0: 0, 1: 1}),
        ("microbatches", {0: 2, 1: 3}),
        # sizes of collectives follow from it, and nothing of the program shows it
        ("capacity", {0: "None", 1: "6"}),
        ("loss_scale", None),
    ],
)
def test_a_planted_disagreement_raises_on_every_rank(ranks: RankPool, setting: str, values: Any) -> None:
    found = ranks(2, planted, setting, limit=20.0)
    assert [rank["field"] for rank in found] == [setting, setting]
    assert found[0]["value"] == found[1]["value"]
    assert values is None or found[0]["value"] == values
    assert max(rank["seconds"] for rank in found) < 10


def test_ranks_that_agree_go_on(ranks: RankPool) -> None:
    """Negative control of the test above."""
    assert [rank["field"] for rank in ranks(2, planted, "nothing")] == [None, None]


def set_after_a_step(layers: tuple[int, int]) -> tuple[str, int]:
    """The ranks set another rule each; the field that they disagree on, and how many steps succeeded."""
    world = join()
    works = Works()
    model = Decoder(ModelConfig(**TINY), transport=AllToAll(world.ep_group, works, world.collectives))
    chunk = ModelChunk(model, recompute=RecomputeConfig.none(), lanes=WorkLanes(works), world=world)
    tokens = torch.arange(18).view(2, 1, 9)
    feeds = [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens]
    train_step(chunk, feeds)
    chunk.recompute = RecomputeConfig.uniform(layers[world.rank])
    try:
        train_step(chunk, feeds)
    except ConfigError as error:
        return error.field, chunk.steps_done
    return "", chunk.steps_done


def test_settings_that_change_are_compared_again(ranks: RankPool) -> None:
    assert ranks(2, set_after_a_step, (1, 2), limit=20.0) == [("segments", 1)] * 2
    assert ranks(2, set_after_a_step, (2, 2), limit=20.0) == [("", 2)] * 2


def only_in_one_stage() -> tuple[str, Any]:
    world = open_world(ParallelLayout(world_size=4, ep=2, pp=2))
    try:
        agree(world, {"layers": world.place.pp, "order": "x" if world.rank == 3 else "y"})
    except ConfigError as error:
        return error.field, error.value
    return "", None


def test_stages_may_differ_but_every_rank_hears_of_a_difference_in_one(ranks: RankPool) -> None:
    assert ranks(4, only_in_one_stage) == [("order", {2: "y", 3: "x"})] * 4


def late_rank() -> str:
    world = join(seconds=0.5)
    if world.rank == 1:
        time.sleep(1.5)
        return ""
    try:
        gather(world, "here")
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(ranks: RankPool) -> None:
    message, _ = ranks(2, late_rank, limit=20.0)
    assert "Timed out" in message or "timeout" in message.lower()


def issued(extra: bool) -> tuple[dict[int, str], str]:
    world = join(debug=True)
    assert world.debug is not None
    for number in range(3):
        world.collectives.record("all_to_all", f"number {number}", torch.empty(number + world.rank, 4))
    compare_collectives(world)
    assert world.debug.entries == []
    world.collectives.record("all_to_all", "rows", torch.empty(2, 4))
    if extra and world.rank == 1:
        world.collectives.record("all_reduce", "more", torch.empty(2))
    try:
        compare_collectives(world)
    except RanksDisagree as error:
        return error.first, str(error)
    dist.barrier()
    return {}, ""


@pytest.mark.parametrize("extra", [False, True])
def test_what_ranks_issued_is_compared_after_a_step(ranks: RankPool, extra: bool) -> None:
    first, second = ranks(2, issued, extra)
    assert first == second
    assert first[0] == ({0: "entry 1: none", 1: "entry 1: all_reduce more float32 [1]"} if extra else {})
    assert first[1].endswith("; rank 1: entry 1: all_reduce more float32 [1]") == extra


def test_one_process_agrees_with_itself() -> None:
    agree(SOLO, {"layers": 1})
    compare_collectives(SOLO)
    assert gather(SOLO, 7) == [7]


class Trip:
    """Fails in one slot."""

    def __init__(self, slot: str) -> None:
        self._slot = slot

    def before(self, issue: Any, owner: Any) -> None:
        if f"{issue.slot.op}{owner.number}.{issue.stage.label}" == self._slot:
            raise ArithmeticError("planted")

    def after(self, issue: Any, owner: Any) -> None: ...


def after_a_failed_step(slots: tuple[str, str]) -> list[object]:
    """A step that fails in each rank's slot, an evaluation, the step again: how each ends, and what differs then."""
    world = world_of()
    chunk, fresh = (parallel_chunk(world, DataSettings(bucket_bytes=2000)) for _ in range(2))
    train_step(fresh, feeds_of(world.rank, 2))
    ends: list[object] = []
    for step, trip in ((train_step, Trip(slots[world.rank])), (forward_only, Trip("")), (train_step, Trip(""))):
        chunk.zero_grad()
        try:
            step(chunk, feeds_of(world.rank, 2), observers=(trip,))
            ends.append("")
        except (ArithmeticError, RanksDisagree) as error:
            ends.append(str(error))
    return [*ends, compare(gradients(fresh), gradients(chunk)).different]


def test_ranks_that_stopped_at_different_places_do_not_go_on() -> None:
    """A reduction that one of them launched would pair with another one of the next step."""
    # processes of their own: that reduction stays under way
    with start_ranks(2, after_a_failed_step, ("B1.1.attn", "B1.0.attn")) as workers:
        outcome = collect(workers, 60.0)
    assert outcome.failures == {}
    first, second = outcome.results[0], outcome.results[1]
    assert first[:3] == second[:3]
    assert first[0] == "planted"
    assert first[1] == first[2]
    assert str(first[1]).startswith("ranks issued different collectives: rank 0: ")


def test_ranks_that_stopped_at_the_same_place_go_on(ranks: RankPool) -> None:
    """Negative control of the test above."""
    assert ranks(2, after_a_failed_step, ("B1.1.attn", "B1.1.attn")) == [["planted", "", "", ()]] * 2
