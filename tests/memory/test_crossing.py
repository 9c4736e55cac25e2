"""What stream lanes hold of each other's memory is predicted: a real step on stand-ins for streams, byte for byte."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.chunk import ModelChunk
from overlap.dispatch import LocalTransport
from overlap.ir import Lane
from overlap.memory import fake_chunk, measure_peak, measure_step, predict_step, take_footprint
from overlap.memory.crossing import CrossLanes
from overlap.memory.facts import Footprint
from overlap.memory.oracle import highest_of
from overlap.memory.refs import Ref, Source
from overlap.model import Decoder, ModelConfig
from overlap.streams import StreamLanes
from recompute.config import RecomputeConfig, Replay
from tests.memory.compare import VOCAB, assert_same, none, tokens, uniform

MICROBATCHES = 3


class Stream:
    """Nothing runs on it."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""


class Event:
    """Nothing to record."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, stream: Stream) -> None:
        """Nothing."""


class Copies(LocalTransport):
    """The wire allocates what it delivers, as between ranks."""

    def dispatch(self, tokens: Tensor, probs: Tensor, routing: Any, *, pinned: Any = None) -> Any:
        """Copies."""
        rows, weights, arrival = super().dispatch(tokens, probs, routing, pinned=pinned)
        return rows.clone(), weights.clone(), arrival

    def dispatch_adjoint(self, grads: Any, pinned: Any) -> Any:
        """Copies."""
        return (*(None if grad is None else grad.clone() for grad in grads[:2]), None)

    def combine(self, rows: Tensor, routing: Any, arrival: Any) -> Tensor:
        """A copy."""
        return rows.clone()

    def combine_adjoint(self, grads: Any, pinned: Any) -> Any:
        """A copy."""
        (grad,) = grads
        return None if grad is None else grad.clone(), None, None


TRANSPORTS = {"local": LocalTransport, "copies": Copies}
CASES = [
    ("multi_queue", none, False, "copies"),
    ("multi_queue", uniform(1), True, "local"),
    ("multi_queue", uniform(1, replay=Replay.HIDDEN), True, "copies"),
    ("single_queue", none, True, "local"),
    ("single_queue", uniform(1), True, "copies"),
    ("early_release", uniform(1), False, "local"),
    ("early_release", none, True, "copies"),
]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events of a device that is not there."""
    monkeypatch.setattr(torch, "Stream", lambda device, priority: Stream())
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: None)


def build(
    rule: RecomputeConfig = none, order: str = "multi_queue", delay: bool = False, wire: str = "local", lead: int = 0
) -> ModelChunk:
    config = ModelConfig(vocab=VOCAB, layers=2, dense_layers=0, hidden=16, kv_rank=8)
    model = Decoder(config, transport=TRANSPORTS[wire]())
    return ModelChunk(model, recompute=rule, order=order, delay_wgrad=delay, lead=lead)


@cache
def footprint(wire: str, constants: bool) -> Footprint:
    """Constants in graphs are the allocator's, not the tracker's."""
    with fake_chunk(lambda: build(wire=wire)) as chunk:
        return take_footprint(chunk, tokens(1)[0], constants=constants)


@pytest.mark.parametrize(("order", "rule", "delay", "wire"), CASES, ids=str)
def test_every_border_and_the_peak(streams, order, rule, delay, wire) -> None:
    chunk = build(rule, order, delay, wire)
    chunk.lanes = StreamLanes(torch.device("cpu"))
    bare, found = ([footprint(wire, constants)] * MICROBATCHES for constants in (False, True))
    assert_same(measure_step(chunk, tokens(MICROBATCHES)).usage, predict_step(chunk, bare, streams=True))
    assert highest_of(chunk, found, streams=True).bytes == measure_peak(chunk, tokens(MICROBATCHES))


@pytest.mark.parametrize(("rule", "lead"), [(uniform(1), 1), (none, 2)], ids=str)
def test_every_border_and_the_peak_with_a_lead(streams, rule, lead) -> None:
    chunk = build(rule, "single_queue", True, "copies", lead)
    chunk.lanes = StreamLanes(torch.device("cpu"))
    bare, found = ([footprint("copies", constants)] * MICROBATCHES for constants in (False, True))
    assert_same(measure_step(chunk, tokens(MICROBATCHES)).usage, predict_step(chunk, bare, streams=True))
    assert highest_of(chunk, found, streams=True).bytes == measure_peak(chunk, tokens(MICROBATCHES))


def test_what_waits_is_held_with_its_graph() -> None:
    """A tensor keeps the graph that made it: its storage is not all that is held."""
    seen, behind = Ref(Source.READ, 0), Ref(Source.FORWARD, 0)
    held = SimpleNamespace(pending={"stage": (None, {seen: 7, behind: 8}, (7,))})
    issue = SimpleNamespace(
        lane=Lane.COMPUTE, stage=SimpleNamespace(key="stage"), pending_owners=(Lane.COMM,), waits=(),
        foreign=(), foreign_owners=(), foreign_pieces=(), piece_owners=(), foreign_leaves=(),
    )  # fmt: skip
    lanes = CrossLanes()
    lanes.begin(issue, 0, held)
    assert [sorted(ids) for ids in lanes.ids()] == [[7, 8]]


@pytest.mark.parametrize("wire", TRANSPORTS)
def test_lanes_hold_more_than_one_lane_would(wire) -> None:
    """Negative control."""
    chunk = build(uniform(1), "single_queue", True, wire)
    found = [footprint(wire, False)] * MICROBATCHES
    apart, together = (predict_step(chunk, found, streams=streams) for streams in (True, False))
    assert apart.total > together.total
    assert apart.curve[-1].slot == together.curve[-1].slot


def test_the_end_of_the_step_holds_nothing_of_the_lanes(streams) -> None:
    """Buffers are copied when lanes have let go: a model of many buffers peaks there."""
    chunk = build(uniform(1), "single_queue", True, "copies")
    chunk.module.register_buffer("large", torch.zeros(10**5))
    chunk.lanes = StreamLanes(torch.device("cpu"))
    predicted = highest_of(chunk, [footprint("copies", True)] * MICROBATCHES, streams=True)
    assert predicted.slot == "end of step"
    assert predicted.bytes == measure_peak(chunk, tokens(MICROBATCHES))
