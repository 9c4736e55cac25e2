"""The gradient bridge from depths back to the decoder, whoever is replayed first: values, never leaves to hand over."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, Op
from overlap.check import check_stages
from overlap.engine import Engine, MicrobatchState
from overlap.errors import ScheduleError
from overlap.ir import Program
from overlap.lower import Issue
from overlap.model import Decoder
from overlap.plan import BACKWARD_SIDE, make_schedule, segments_of
from overlap.side import Side
from overlap.step import step_plans, train_step
from overlap.validate import validate
from recompute import RecomputeConfig
from tests.cases.graveyard import Keeps, reads_of
from tests.mtp.tools import (
    NONE,
    B,
    U,
    chunk_feeds,
    config_of,
    different,
    gradients_of,
    make,
    reference_gradients,
    reference_values,
    tiny,
    verdict_of,
)

BRIDGES = [{"mtp": 1}, {"mtp": 1, "mhc": 2}, {"mtp": 2, "mhc": 2}, {"mtp": 2, "mtp_repeat": True}]
EVERY = [NONE, U(1), U(2), B(3), B(1, recompute_mtp=True)]
# Every rule with and without streams; a second depth, own or repeated, beside a replayed and an eager producer.
RULED = [*((bridge, rule) for bridge in BRIDGES[:2] for rule in EVERY),
         (BRIDGES[2], U(1)), (BRIDGES[2], EVERY[-1]), (BRIDGES[3], U(2)), (BRIDGES[3], B(3))]  # fmt: skip


class DepthsOnly(Decoder):
    """The losses of the depths alone."""

    def program(self) -> Program:
        program = super().program()
        return replace(program, losses=tuple(loss for loss in program.losses if loss.value.startswith("mtp")))


def decoder_names(chunk: ModelChunk) -> set[str]:
    return {name for name, _ in chunk.module.named_parameters() if name.startswith(("embedding", "layers."))}


@pytest.mark.parametrize(("settings", "rule"), RULED, ids=str)
def test_depths_train_the_decoder(settings: dict[str, Any], rule: RecomputeConfig) -> None:
    """Row 24 and B1: with the losses of the depths alone every decoder parameter has its gradient, bit for bit."""
    config = tiny(layers=3, aux_coefficient=0.0, z_coefficient=0.0, **settings)
    chunk = ModelChunk(DepthsOnly(config), recompute=rule)
    feeds = chunk_feeds(chunk, 2)
    gradients = gradients_of(chunk, feeds)
    assert different(reference_gradients(chunk, feeds), gradients) == ()
    assert {name for name in decoder_names(chunk) if gradients[name] is None or not gradients[name].any()} == set()


def side_of(chunk: ModelChunk, rule: RecomputeConfig) -> Side:
    return Side(chunk.program, segments_of(chunk.program, rule), chunk.program.trained())


@pytest.mark.parametrize("settings", BRIDGES, ids=str)
def test_a_depth_is_replayed_with_its_end(settings: dict[str, Any]) -> None:
    """Row 24 and B1, negative control: without the replay of `mtp_post` the schedule is refused."""
    chunk = make(U(1), **settings)
    side = side_of(chunk, U(1))
    schedule = make_schedule(chunk.order, None, side, delayed=False)
    ends = [slot for slot in schedule if slot.op is Op.REPLAY and slot.stage == "mtp_post"]
    assert [slot.layer for slot in ends] == sorted(chunk.program.mtp_layers, reverse=True)
    with pytest.raises(ScheduleError, match="has no graph: replay the stage before it"):
        validate(tuple(slot for slot in schedule if slot != ends[0]), {BACKWARD_SIDE: side})


@pytest.mark.parametrize("dense", [0, 2])
def test_streams_make_post_need_the_combine_output(dense: int) -> None:
    """R8: post has no adjoint then, so that combine and post are replayed; eliding them anyway is refused."""
    plain, chunk = make(U(1), dense_layers=dense), make(U(1), dense_layers=dense, mhc=2)
    assert [s.adjoint is None for s in plain.program.stages if s.name == "post"] == [False, False]
    assert [s.adjoint is None for s in chunk.program.stages if s.name == "post"] == [True, True]
    assert all(stage.lane.value == "compute" for stage in chunk.program.stages if stage.name == "post")
    side = side_of(chunk, U(1))
    needed = {stage.key for stage in chunk.program.stages if stage.layer is not None}
    assert side.replay_needed == needed
    schedule = make_schedule(chunk.order, None, side, delayed=False)
    for name, fault in (("combine", "'1.combined' of its own segment"), ("post", "has no graph")):
        elided = tuple(slot for slot in schedule if (slot.op, slot.key) != (Op.REPLAY, (1, name)))
        if len(elided) < len(schedule):
            with pytest.raises(ScheduleError, match=fault):
                validate(elided, {BACKWARD_SIDE: side})
    assert {(0, "post"), (0, "combine")} & side_of(plain, U(1)).replay_needed == set()


@pytest.mark.parametrize("mhc", [None, 2])
@pytest.mark.parametrize("rule", [B(3), B(1), U(1), U(2), U(3), B(1, recompute_mtp=True)], ids=str)
def test_producer_and_consumer_replayed_or_eager(mhc: int | None, rule: RecomputeConfig) -> None:
    """B2, B3, B4, B5, B6: each of producer and consumer of the bridge replayed or eager, in one segment or several."""
    chunk = make(rule, layers=3, mtp=2, mhc=mhc)
    segments = [segment.layers for segment in segments_of(chunk.program, rule)]
    replayed = {layer for layers in segments for layer in layers}
    wanted = {
        "block 3": {0, 1, 2},
        "block 1": {0},
        "block 1 + mtp": {0, 3, 4},
    }.get(str(rule), {0, 1, 2, 3, 4})
    assert replayed == wanted
    assert verdict_of(chunk, 2).equal


class BridgeGradient(Engine):
    """Notes the gradients that arrive for some values."""

    seen: dict[tuple[int, str], Tensor]

    def __init__(self, *args: Any, values: tuple[str, ...], seen: dict[tuple[int, str], Tensor], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._values = values
        self._seen = seen

    def _gradient(self, seed: Any, pieces: Any, value: str, owner: MicrobatchState) -> Tensor | None:
        total = super()._gradient(seed, pieces, value, owner)
        if value in self._values:
            assert total is not None
            assert (owner.number, value) not in self._seen
            self._seen[owner.number, value] = total.clone()
        return total


@pytest.mark.parametrize(("settings", "rule"), RULED, ids=str)
def test_the_gradient_of_the_bridge(settings: dict[str, Any], rule: RecomputeConfig) -> None:
    """Row 26 and B25: per microbatch, with two in flight, equal to the reference's gradient of that very tensor."""
    chunk = make(rule, **settings)
    feeds = chunk_feeds(chunk, 3)
    layers = len(chunk.program.layers)
    values = ("embedded", *(f"{layer}.hidden" for layer in range(layers)))
    expected = reference_values(chunk, feeds)
    seen: dict[tuple[int, str], Tensor] = {}
    train_step(chunk, feeds, engine_type=lambda *args, **rest: BridgeGradient(*args, values=values, seen=seen, **rest))
    assert set(seen) == {(number, value) for number in range(3) for value in values}
    for (number, value), gradient in seen.items():
        assert torch.equal(gradient, expected[number][value].grad), (number, value)


def test_two_depths_add_up_on_the_bridge() -> None:
    """Row 26: with streams the head and the first depth read the decoder's state, and the next depth the first's."""
    chunk = make(U(1), mtp=2, mhc=2)
    readers = {value: [stage.label for stage in chunk.program.readers[value]] for value in ("1.hidden", "2.hidden")}
    assert readers == {"1.hidden": ["2.attn", "head"], "2.hidden": ["2.mtp_post", "3.attn"]}


class GraphLog:
    """Observer that logs backwards, and checks that values are free of graphs."""

    def __init__(self) -> None:
        self.backwards: list[tuple[int, str]] = []

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.BACKWARD:
            self.backwards.append((owner.number, issue.stage.label))

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        tensors = [value for value in owner.values.values() if torch.is_tensor(value)]
        assert all(tensor.grad_fn is None for tensor in tensors)
        assert all(gradient.grad_fn is None for gradient in owner.grads.values())


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_each_backward_runs_once_in_schedule_order(rule: RecomputeConfig) -> None:
    """Row 25 and B24: two streams and a depth; no backward reaches past its stage, no graph is entered twice."""
    chunk = make(rule, layers=3, mtp=1, mhc=2)
    log = GraphLog()
    entered: Counter[str] = Counter()
    for name, parameter in chunk.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: entered.update([name]))
    train_step(chunk, chunk_feeds(chunk, 2), observers=(log,))
    program = chunk.program
    for number in range(2):
        order = [label for owner, label in log.backwards if owner == number]
        assert Counter(order) == Counter({stage.label: 1 for stage in program.stages})
        place = {label: index for index, label in enumerate(order)}
        for value, producer in program.producers.items():
            for reader in program.readers[value]:
                if not program.nondiff(value):
                    assert place[reader.label] < place[producer.label]
    assert set(entered.values()) == {2}


def left_by_a_step(chunk: ModelChunk, engine_type: Callable[..., Engine]) -> tuple[int, int]:
    """How many storages of values a step saw that were not there before, and how many live when it is over."""
    born: list[weakref.ref[torch.UntypedStorage]] = []
    lasting = {tensor.untyped_storage().data_ptr() for tensor in chunk.parameters()}
    feeds = chunk_feeds(chunk, 2)
    # Outside the step: what torch imports when a process first uses an operator of ours keeps frames until collected.
    check_stages(chunk, feeds[0])
    chunk.checked = True

    class Noting:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            written = [owner.values[key] for key in issue.writes if key is not None]
            storages = [value.untyped_storage() for value in written if torch.is_tensor(value)]
            born.extend(weakref.ref(storage) for storage in storages if storage.data_ptr() not in lasting)

    gc.collect()
    gc.disable()
    try:
        train_step(chunk, feeds, observers=(Noting(),), engine_type=engine_type)
        return len(born), sum(ref() is not None for ref in born)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        *(({"mtp": 2, "mhc": 2}, rule) for rule in (NONE, U(1), B(2, recompute_mtp=True))),
        ({"mtp": 2, "mtp_repeat": True, "padding": True}, U(1)),
    ],
    ids=str,
)
def test_nothing_of_a_step_stays(settings: dict[str, Any], rule: RecomputeConfig) -> None:
    """B21: after the step no storage of it lives, without the garbage collector's help; twice."""
    chunk = make(rule, **settings)
    for _ in range(2):
        born, alive = left_by_a_step(chunk, Engine)
        assert born > 50
        assert alive == 0


def test_what_lives_until_the_next_step_is_seen() -> None:
    """B21, negative control: an engine keeps what graphs read, in tensors of its own, until its next step."""
    kept: list[Tensor] = []
    born, alive = left_by_a_step(make(U(1), mtp=2, mhc=2), partial(Keeps, kept, reads_of))
    assert kept
    assert 50 < alive < born


def test_without_the_handed_over_piece_the_decoder_differs() -> None:
    """B1's symptom: drop the bridge's gradient and only the decoder and what is before it differ, silently."""
    chunk = make(U(1), mtp=1, mhc=2)
    feeds = chunk_feeds(chunk, 2)
    reader = chunk.program.position[2, "attn"]

    class Dropping(Engine):
        def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
            super()._backward(issue, owner)
            owner.grads.pop(("1.hidden", reader), None)

    changed = set(different(gradients_of(chunk, feeds), gradients_of(chunk, feeds, engine_type=Dropping)))
    routed = {name for name in decoder_names(chunk) if not name.endswith("residual.gains")}
    assert changed <= decoder_names(chunk)
    assert len(changed) > len(routed) // 2


@pytest.mark.parametrize("mtp", [0, 1, 2])
@pytest.mark.parametrize("layers", [0, 2])
def test_chunks_with_nothing_but_embedding_layers_or_depths(layers: int, mtp: int) -> None:
    """B28: E, L and MTP-only chunks; no segment where there is no layer."""
    for rule in (U(1), B(1, recompute_mtp=True)):
        chunk = make(rule, layers=layers, mtp=mtp)
        count = (layers if rule == U(1) else min(layers, 1)) + mtp
        assert len(segments_of(chunk.program, rule)) == count
        assert verdict_of(chunk).equal


@pytest.mark.parametrize("settings", [{"mtp": 2, "mhc": 2}, {"mtp": 1, "mtp_repeat": True}], ids=str)
def test_depths_have_slots_in_every_plan(settings: dict[str, Any]) -> None:
    """Meta-check: the rules above do replay the depths, and block leaves them alone."""
    depths = config_of(make(**settings)).mtp
    for rule, replayed in ((NONE, 0), (U(1), depths), (B(1), 0), (B(1, recompute_mtp=True), depths)):
        chunk = make(rule, **settings)
        slots = [issue.slot for plan, _ in step_plans(chunk, 3) for issue in plan.issues]
        ends = [slot for slot in slots if slot.op is Op.REPLAY and slot.stage == "mtp_post"]
        assert len(ends) == 3 * replayed


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("rule", [U(1), B(1)], ids=str)
def test_under_autocast(rule: RecomputeConfig) -> None:
    """R15: forward inside autocast, backward and replay by the engine."""
    chunk = make(rule, mtp=2, mhc=2, mtp_repeat=True, tied=True, padding=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert verdict_of(chunk).equal
