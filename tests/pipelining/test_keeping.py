"""Segment inputs of pipeline parts that wait in host memory: bits, slots, what is alive between the halves."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from overlap.engine import Engine, MicrobatchState
from overlap.ir import Op
from overlap.keeping import LOADED, STORED
from overlap.lower import Issue, Plan
from overlap.pipelining import ScheduleKind, evaluate_pipeline, make_orders, train_pipeline
from overlap.pipelining.in_flight import in_flight
from overlap.pipelining.stage import ChunkStage
from overlap.pipelining.verify import merge_embedding
from overlap.reference import reference_step
from recompute.config import Keep, Method, RecomputeConfig, Replay
from recompute.keep import Parked
from tests.pipelining.models import alone, batch, different, make_pipeline, make_reference, small, uniform

HOST = Keep.HOST
STAGES = RecomputeConfig.selective("attn", "experts", keep=HOST)
BLOCK = uniform(1, method=Method.BLOCK, keep=HOST)
STATE = 2 * 6 * 8 * 4
"""Bytes of a state: 2 rows of 6 positions, width 8, float32."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone():
        yield


def compared(kind: ScheduleKind, rule: RecomputeConfig, fields: dict[str, Any], more: dict[str, Any]) -> list[str]:
    """A step of four microbatches; names of what differs from autograd's."""
    config = small(**{"layers": 4, "mtp": 1, **fields})
    engine_type = more.pop("engine_type", Engine)
    pipeline = make_pipeline(kind, config, rule, **more)
    reference = make_reference(kind, config, rule, **{k: v for k, v in more.items() if k == "order"})
    feeds = batch(config, 4)
    expected = reference_step(reference, feeds)
    merge_embedding(reference)
    return different(pipeline, reference, train_pipeline(pipeline, feeds, engine_type=engine_type), expected)


@pytest.mark.parametrize(
    ("kind", "rule", "fields", "more"),
    [
        (ScheduleKind.INTERLEAVED, uniform(1, Replay.HIDDEN, keep=HOST), {"mhc": 2}, {"order": "single_queue"}),
        (ScheduleKind.INTERLEAVED, STAGES, {"cut_attention": True}, {}),
        (ScheduleKind.INTERLEAVED, BLOCK, {"tied": True, "layers": 3}, {"vpp": 4, "per_stage": (2, 0, 1, 0)}),
        (ScheduleKind.DUALPIPEV, uniform(2, keep=HOST), {}, {}),
        (ScheduleKind.DUALPIPEV, BLOCK, {}, {}),
        (ScheduleKind.ZBV, uniform(1, Replay.HIDDEN, keep=HOST), {}, {}),
        (ScheduleKind.ZBV, uniform(2, keep=HOST), {}, {"pin": True}),
        (ScheduleKind.ZBV, STAGES, {"layers": 2}, {}),
    ],
)
def test_no_bit_changes(
    kind: ScheduleKind, rule: RecomputeConfig, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    assert compared(kind, rule, fields, more) == []


class Stale(Engine):
    """Control: what returns to layer 2, the first of its part, is another microbatch's."""

    first: Any = None

    def _load(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._load(issue, owner)
        if issue.stage.name == "recv":
            self.first = owner.values["received", LOADED] if self.first is None else self.first
            owner.values["received", LOADED] = self.first


def test_a_wrong_input_is_seen() -> None:
    found = compared(ScheduleKind.ZBV, uniform(keep=HOST), {"mtp": 0}, {"engine_type": Stale})
    assert "layers.2.router.weight" in found
    assert "loss" not in found


class Moves:
    """Counts S and L, and follows what S made."""

    def __init__(self) -> None:
        self.slots: Counter[str] = Counter()
        self.parked: list[weakref.ref[torch.Tensor]] = []

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing has moved."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op in (Op.STORE, Op.LOAD):
            self.slots[f"{issue.slot.op} {issue.stage.label}"] += 1
        if issue.slot.op is Op.STORE:
            self.parked += [weakref.ref(owner.values[key].kept) for key in issue.writes if key is not None]


class Between(Engine):
    """Looks at all microbatches before each plan runs: each is between two of its own."""

    stages: tuple[ChunkStage, ...] = ()
    found: tuple[list[tuple[int, ...]], list[str]] = ([], [])
    """Per plan, how many microbatches of each stage have inputs elsewhere; and what is wrong."""

    def run(self, plan: Plan, states: Mapping[int, MicrobatchState]) -> None:
        counts, wrong = self.found
        counts.append(tuple(sum(map(away, stage.states.values())) for stage in self.stages))
        for stage, owner in ((s, o) for s in self.stages for o in s.states.values() if o.values.keys() - FED):
            near = {(value, copy) for value, copy in owner.values if value in STORED_BY[stage.stage_index]}
            if {key for key in near if key[1] != STORED}:
                wrong.append(f"{near} of microbatch {owner.number} is on the device")
            if away(owner) and parked_bytes(owner) != 2 * STATE:
                wrong.append(f"{parked_bytes(owner)} bytes of microbatch {owner.number} wait")
            if away(owner) and owner.pending:
                wrong.append(f"microbatch {owner.number} has run backward, and its inputs wait yet")
        super().run(plan, states)


FED = {("ids", 0), ("labels", 0)}
STORED_BY = (("embedded", "0.hidden"), ("received", "2.hidden"))
"""Inputs of the segments of each stage: four layers, one a segment."""


def away(owner: MicrobatchState) -> bool:
    return any(copy == STORED for _, copy in owner.values)


def parked_bytes(owner: MicrobatchState) -> int:
    return sum(value.kept.nbytes for value in owner.values.values() if type(value) is Parked)


@pytest.mark.parametrize("kind", [ScheduleKind.DUALPIPEV, ScheduleKind.ZBV])
def test_between_the_halves_inputs_wait_elsewhere_only(kind: ScheduleKind) -> None:
    """Each input once away and back per microbatch; none in an evaluation; as many wait as microbatches in flight."""
    config, moves = small(layers=4), Moves()
    pipeline = make_pipeline(kind, config, uniform(keep=HOST))
    found: tuple[list[tuple[int, ...]], list[str]] = ([], [])
    looking = type("Looking", (Between,), {"stages": pipeline.stages, "found": found})
    train_pipeline(pipeline, batch(config, 4), engine_type=looking, observers=(moves,))
    assert moves.slots == dict.fromkeys((f"{op} {s}" for op in "SL" for s in ("embed", "0.post", "recv", "2.post")), 4)
    counts, wrong = found
    assert wrong == []
    orders = make_orders(kind, pipeline.layout, 4)
    assert dict(enumerate(map(max, *counts))) == in_flight(orders).stages
    evaluate_pipeline(pipeline, batch(config, 4), observers=(moves,))
    assert moves.slots.total() == 2 * 4 * 4
    assert [reference() for reference in moves.parked] == [None] * 16


class Fails(Engine):
    """Raises when one input is back and others wait."""

    def _load(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._load(issue, owner)
        if owner.number == 1:
            raise ArithmeticError("planted")


def test_a_failed_step_leaves_nothing_elsewhere() -> None:
    config, moves = small(layers=4), Moves()
    pipeline = make_pipeline(ScheduleKind.ZBV, config, uniform(keep=HOST))
    with pytest.raises(ArithmeticError, match="planted"):
        train_pipeline(pipeline, batch(config, 4), engine_type=Fails, observers=(moves,))
    assert len(moves.parked) == 8
    assert not any(stage.states for stage in pipeline.stages)
    assert [reference() for reference in moves.parked] == [None] * 8
    reference = make_reference(ScheduleKind.ZBV, config, uniform())
    expected = reference_step(reference, batch(config, 4))
    for chunk in pipeline.chunks:
        chunk.zero_grad()
    assert different(pipeline, reference, train_pipeline(pipeline, batch(config, 4)), expected) == []


def test_microbatches_may_keep_elsewhere_or_not() -> None:
    config = small(layers=4)
    rules = [uniform(keep=HOST), uniform(), STAGES, uniform(2, keep=HOST)]
    pipeline = make_pipeline(ScheduleKind.DUALPIPEV, config, rules)
    reference = make_reference(ScheduleKind.DUALPIPEV, config, rules)
    expected = reference_step(reference, batch(config, 4))
    assert different(pipeline, reference, train_pipeline(pipeline, batch(config, 4)), expected) == []
