"""Pipelines on several ranks: bitwise equality, messages under delays, receive buffers, expert parallelism."""

from __future__ import annotations

import random
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap import lower
from overlap.dispatch.all_to_all import AllToAll
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Lane
from overlap.lanes import NullLanes
from overlap.lower import Issue
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.work_lanes import WorkLanes
from overlap.parallel.works import Works
from overlap.parallel.world import open_world
from overlap.pipelining import (
    ScheduleKind,
    compat,
    evaluate_pipeline,
    make_layout,
    make_orders,
    placement_of,
    train_pipeline,
)
from overlap.pipelining.channels import Wire
from overlap.pipelining.verify import merge_embedding
from overlap.reference import reference_step
from recompute.config import Keep, RecomputeConfig, Replay
from recompute.errors import ConfigError
from tests.cases.clocked_streams import CheckedLanes, use_clocked_streams
from tests.distributed.ranks import RankPool, collect, start_ranks
from tests.pipelining.models import LostGradient, batch, different, make_pipeline, make_reference, small, uniform

pytestmark = pytest.mark.distributed


class Dawdling(Engine):
    """Sleeps before transfers and before some others, differently on every rank."""

    def __init__(self, *args: Any, seed: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._draw = random.Random(f"{seed} {dist.get_rank()}")

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        """Up to 3 ms before a transfer, and before every tenth other slot."""
        if issue.lane is Lane.P2P or self._draw.random() < 0.1:
            time.sleep(self._draw.random() * 3e-3)
        super().issue(issue, owner)


def train(kind: ScheduleKind, fields: dict[str, Any], rule: RecomputeConfig, engine: str, more: dict[str, Any]) -> Any:
    """Two steps with an evaluation between them; what differs, and the buffers of each channel to another rank."""
    engines: dict[str, Any] = {
        "plain": Engine, "dawdling": partial(Dawdling, seed=more.pop("seed", 0)), "lost": LostGradient,
    }  # fmt: skip
    config = small(**{"layers": 4, **fields})
    count, stages = more.pop("microbatches", 4), dist.get_world_size() * more.get("vpp", 2)
    pipeline = make_pipeline(kind, config, rule, **more)
    reference = make_reference(kind, config, rule, stages=stages)
    found: list[str] = []
    for step in range(2):
        feeds = batch(config, count, step)
        expected = reference_step(reference, feeds)
        merge_embedding(reference)
        losses = train_pipeline(pipeline, feeds, engine_type=engines[engine])
        found += different(pipeline, reference, losses, expected)
        for module in (reference, *pipeline.chunks):
            module.zero_grad()
        evaluate_pipeline(pipeline, feeds)
    wires = [channel for channel in pipeline.channels if isinstance(channel, Wire)]
    return found, [(wire.peak, wire.live) for wire in wires]


@pytest.mark.parametrize(
    ("kind", "fields", "rule", "more"),
    [
        (ScheduleKind.INTERLEAVED, {"mtp": 1, "mhc": 2}, uniform(1, Replay.HIDDEN), {}),
        (ScheduleKind.DUALPIPEV, {"mtp": 1}, uniform(), {"microbatches": 5}),
        (ScheduleKind.ZBV, {"tied": True}, RecomputeConfig.none(), {"microbatches": 3}),
        (ScheduleKind.INTERLEAVED, {"layers": 3}, RecomputeConfig.block(1), {"per_stage": (2, 0, 1, 0)}),
        (ScheduleKind.INTERLEAVED, {}, uniform(1, Replay.HIDDEN, keep=Keep.HOST), {"microbatches": 2}),
        (ScheduleKind.ZBV, {}, RecomputeConfig.selective("attn", "experts", keep=Keep.HOST), {"microbatches": 3}),
        (ScheduleKind.ONE_F_ONE_B, {"tied": True}, uniform(2), {"vpp": 1, "microbatches": 3}),
    ],
)
def test_two_ranks_equal_autograd(
    ranks: RankPool, kind: ScheduleKind, fields: dict[str, Any], rule: RecomputeConfig, more: dict[str, Any]
) -> None:
    for found, buffers in ranks(2, train, kind, fields, rule, "dawdling", more):
        assert found == []
        assert [live for _, live in buffers] == [0] * len(buffers)


def test_a_lost_gradient_is_seen(ranks: RankPool) -> None:
    """Negative control of the comparison."""
    first, second = ranks(2, train, ScheduleKind.INTERLEAVED, {}, uniform(), "lost", {})
    assert any(name.startswith("layers.0") for name in first[0])
    assert any(name.startswith("layers.1") for name in second[0])


def test_receive_buffers_are_as_many_as_microbatches_in_flight(ranks: RankPool) -> None:
    """At most one per posted receive of a microbatch whose backward has not run; none after the step."""
    kind = ScheduleKind.INTERLEAVED
    results = ranks(2, train, kind, {"dropout": 0.0}, uniform(), "plain", {"microbatches": 8})
    for rank, (found, buffers) in enumerate(results):
        assert found == []
        assert max(peak for peak, _ in buffers) == most_posted(kind, rank, 8)
        assert max(peak for peak, _ in buffers) < 8
        assert sum(live for _, live in buffers) == 0


def received(keep: Keep, streams: bool, control: bool = False) -> tuple[list[tuple[int, int]], list[str]]:
    """Buffers of arriving states, stage by stage: most alive at once and after a step of 8 microbatches."""
    config = small(layers=4, dropout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        use_clocked_streams(patch)
        if control:
            patch.setattr(lower, "passed_on", lambda schedule, sides: ())
        lanes = CheckedLanes() if streams else NullLanes()
        pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform(keep=keep), lanes=lanes)
        train_pipeline(pipeline, batch(config, 8))
    ends = [stage.border.arrivals for stage in pipeline.stages]
    faults = lanes.faults if isinstance(lanes, CheckedLanes) else []
    return [(end.peak, end.live) for end in ends if isinstance(end, Wire)], faults


@pytest.mark.parametrize("streams", [False, True])
def test_receive_buffers_of_inputs_that_wait_elsewhere_are_free_again(ranks: RankPool, streams: bool) -> None:
    """With streams too, where memory is held until its own lane has waited for the copy. Stage 3 does not send."""
    (near0, _), (near1, _) = ranks(2, received, Keep.DEVICE, streams)
    (far0, faults0), (far1, faults1) = ranks(2, received, Keep.HOST, streams)
    assert (near1, near0) == ([(4, 0), (2, 0)], [(3, 0)])
    assert (far1, far0) == ([(1, 0), (2 if streams else 1, 0)], [(2, 0)])
    assert faults0 + faults1 == []


def test_a_received_gradient_is_held_for_the_compute_that_hands_it_on(ranks: RankPool) -> None:
    """Residuals hand on the memory of the p2p stream. Negative control: lowering takes it for compute's."""
    assert [faults for _, faults in ranks(2, received, Keep.DEVICE, True)] == [[], []]
    for _, faults in ranks(2, received, Keep.DEVICE, True, True):
        assert any(re.match(r"memory of B\d\.send goes back while B\d\.\d\.attn uses it", fault) for fault in faults)


def most_posted(kind: ScheduleKind, rank: int, microbatches: int) -> int:
    """Most states that a stage of the rank has room for at once, by the schedule's own order."""
    layout = make_layout(pp=2, vpp=2, layers=4, placement=placement_of(kind))
    actions = compat.lower_actions(make_orders(kind, layout, microbatches), 4, microbatches)[rank]
    live: dict[int, int] = {}
    most = 0
    for action in actions:
        for part in action.sub_actions or (action,):
            stage = part.stage_index
            live[stage] = live.get(stage, 0) + (part.computation_type is compat.RECV_F)
            most = max(most, live[stage])
        for part in action.sub_actions or (action,):
            live[part.stage_index] -= part.computation_type is compat.FULL_BACKWARD and part.stage_index > 0
    return most


def optimizer_of_a_rank() -> int:
    """How many tensors the optimizer of this rank has; as a V the second one may hold two empty stages."""
    pipeline = make_pipeline(ScheduleKind.ZBV, small(layers=2), uniform(), per_stage=(1, 0, 0, 1))
    return sum(len(group["params"]) for group in torch.optim.AdamW(pipeline.parameter_groups()).param_groups)


def test_a_rank_with_empty_stages_has_an_optimizer(ranks: RankPool) -> None:
    first, second = ranks(2, optimizer_of_a_rank)
    assert first > 10
    assert second == 0


def disagree(field: str) -> str:
    world = open_world(ParallelLayout(world_size=2, pp=2))
    scale = Scale(dist.get_rank() if field == "loss_scale" else 0)
    config = small(layers=4, mhc=2 if field == "mhc" and dist.get_rank() else None)
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform(), world=world, loss_scale=scale)
    try:
        train_pipeline(pipeline, batch(small(layers=4), 4))
    except ConfigError as error:
        return error.field
    return ""


def train_with_experts_apart() -> list[str]:
    """Two pipeline ranks times two ranks that share the experts; one step; what differs."""
    world = open_world(ParallelLayout(world_size=4, pp=2, ep=2), debug=True)
    works = Works()
    lanes = WorkLanes(works)
    transport = AllToAll(world.ep_group, works, world.collectives)
    config = small(layers=4, mtp=1, experts=4)
    kind, rule = ScheduleKind.INTERLEAVED, uniform(1, Replay.HIDDEN)
    common: dict[str, Any] = {"world": world, "transport": transport, "lanes": lanes}
    pipeline = make_pipeline(kind, config, rule, group=world.formed.pp, **common)
    reference = make_reference(kind, config, rule, stages=4, **common)
    feeds = batch(config, 4, world.data_rank)
    expected = reference_step(reference, feeds)
    merge_embedding(reference)
    return different(pipeline, reference, train_pipeline(pipeline, feeds), expected)


def test_pipeline_times_experts(ranks: RankPool) -> None:
    """Ranks that share experts issue their all-to-alls in one order under a pipeline too (compared in debug mode)."""
    assert ranks(4, train_with_experts_apart) == [[]] * 4


class Scale:
    """A loss scale that differs by rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"Scale({self._rank})"

    def factor(self, microbatches: Any, accumulate: int, total_tokens: int | None) -> float:
        return 1.0


@pytest.mark.parametrize("field", ["loss_scale", "mhc"])
def test_ranks_with_different_settings_do_not_start(ranks: RankPool, field: str) -> None:
    assert ranks(2, disagree, field, timeout=10.0) == [field, field]


def drawn(count: int, seed: int) -> list[str]:
    """Train drawn (pp, vpp, microbatches) under delays; what went wrong. On as many ranks as `pp` says."""
    draw = random.Random(seed)
    wrong: list[str] = []
    done = 0
    while done < count:
        kind, vpp, microbatches = draw.choice(list(ScheduleKind)), draw.randint(1, 3), draw.randint(1, 9)
        vpp = {ScheduleKind.DUALPIPEV: 2, ScheduleKind.ZBV: 2, ScheduleKind.ONE_F_ONE_B: 1}.get(kind, vpp)
        layout = make_layout(pp=dist.get_world_size(), vpp=vpp, layers=3, placement=placement_of(kind))
        try:
            make_orders(kind, layout, microbatches)
        except ConfigError:
            continue
        more = {"vpp": vpp, "microbatches": microbatches, "seed": done}
        found, buffers = train(kind, {"layers": 3}, uniform(), "dawdling", more)
        torch.distributed.barrier()
        if found or any(live for _, live in buffers):
            wrong.append(f"{kind} vpp {vpp} microbatches {microbatches}: {found[:3]} {buffers}")
        done += 1
    return wrong


def test_drawn_pipelines_under_delays(ranks: RankPool) -> None:
    assert ranks(3, drawn, 2, 7) == [[], [], []]


class OneFails(Engine):
    """Rank 1 fails in the second microbatch of its first layer; rank 0 has sent that one, and waits for its return."""

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        """Layer 1 is the first of rank 1."""
        if issue.slot.layer == 1 and owner.number == 1:
            raise ArithmeticError("planted")
        super().issue(issue, owner)


def after_one_failed() -> list[str]:
    """What a step ends with that fails on rank 1, then an evaluation and another step."""
    config, ends = small(layers=4), []
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
    evaluate_pipeline(pipeline, batch(config, 4))
    for run in (partial(train_pipeline, engine_type=OneFails), evaluate_pipeline, train_pipeline):
        try:
            run(pipeline, batch(config, 4))
        except (ArithmeticError, RuntimeError) as error:
            ends.append(type(error).__name__)
    return ends


def test_no_step_takes_messages_of_one_that_failed() -> None:
    """Rank 1's next step would send what rank 0, still in the failed one, takes for that step's microbatches."""
    with start_ranks(2, after_one_failed, timeout=20.0) as workers:
        outcome = collect(workers, 60.0)
    assert outcome.failures == {}
    assert outcome.results[0] == ["RuntimeError", "PipelineTorn", "PipelineTorn"]
    assert outcome.results[1] == ["ArithmeticError", "PipelineTorn", "PipelineTorn"]
