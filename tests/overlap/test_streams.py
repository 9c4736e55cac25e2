"""StreamLanes' own bookkeeping, with stand-ins for streams and events; real ones are in tests/gpu."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlap import ModelChunk
from overlap.builder import ProgramBuilder
from overlap.contiguous import contiguous_step
from overlap.dispatch import LocalTransport
from overlap.dispatch.round_trip import RoundTrip
from overlap.engine import MicrobatchState
from overlap.ir import Lane, Op
from overlap.lower import Issue
from overlap.model import Decoder, ModelConfig
from overlap.step import train_step
from overlap.streams import StreamLanes
from recompute import RecomputeConfig
from tests.overlap.programs import Own


@dataclass
class FakeStream:
    log: list[str] = field(default_factory=list)

    def wait_event(self, event: Any) -> None:
        self.log.append("wait")

    def wait_stream(self, other: Any) -> None:
        self.log.append("join")


class FakeEvent:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, stream: FakeStream) -> None:
        stream.log.append("record")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stream that is current, last in the list."""
    stack = [FakeStream()]
    monkeypatch.setattr(torch, "Stream", lambda device, priority: FakeStream())
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stack[-1])
    monkeypatch.setattr(torch.accelerator, "set_stream", stack.append)
    return stack


def make(rule: RecomputeConfig, lanes: Any) -> ModelChunk:
    return ModelChunk(Decoder(ModelConfig(layers=3, hidden=16, vocab=32)), recompute=rule, lanes=lanes)


def feeds(count: int = 3) -> list[dict[str, Tensor]]:
    drawn = torch.randint(32, (count, 2, 2, 8), generator=torch.Generator().manual_seed(0))
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


class Watch:
    """Notes how much is held after each issue."""

    def __init__(self, lanes: StreamLanes) -> None:
        self.lanes = lanes
        self.most = 0

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        self.most = max(self.most, sum(len(queue) for queue in self.lanes._held.values()))


@pytest.mark.parametrize(
    "rule", [RecomputeConfig.none(), RecomputeConfig.uniform(1), RecomputeConfig.uniform(2)], ids=str
)
def test_a_step_ends_on_the_callers_stream_and_holds_nothing(rule: RecomputeConfig, current: list[FakeStream]) -> None:
    lanes, caller = StreamLanes(torch.device("cpu")), current[-1]
    watch = Watch(lanes)
    chunk = make(rule, lanes)
    train_step(chunk, feeds(), observers=(watch,))
    assert current[-1] is caller
    assert not lanes._held
    # Bounded by what is in flight between two waits, not by the length of the step.
    assert 0 < watch.most <= 16


def test_streams_change_only_where_the_lane_does(current: list[FakeStream]) -> None:
    lanes = StreamLanes(torch.device("cpu"))
    order: list[Lane] = []

    class Lanes(Watch):
        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            order.append(issue.lane)

    train_step(make(RecomputeConfig.uniform(1), lanes), feeds(), observers=(Lanes(lanes),))
    changes = sum(a is not b for a, b in zip([Lane.COMPUTE, *order], order, strict=False))
    assert len(current) - 1 == changes + 1, "one switch a change, and one back at the end"


def test_what_another_lane_uses_is_held_until_its_owner_has_waited(current: list[FakeStream]) -> None:
    lanes = StreamLanes(torch.device("cpu"))
    alive: dict[str, bool] = {}
    tokens: dict[str, weakref.ref[Tensor]] = {}

    class Look(Watch):
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if str(issue.slot) == "N1.0.dispatch" and owner.number == 0:
                tokens["first"] = weakref.ref(owner.values["0.tokens", 0])

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            if owner.number == 0 and issue.slot.op is Op.NO_GRAD and issue.stage.layer == 0 and tokens:
                alive[issue.stage.name] = tokens["first"]() is not None

    train_step(make(RecomputeConfig.uniform(1), lanes), feeds(), observers=(Look(lanes),))
    # `dispatch` runs on the other lane; `experts` is the first to wait for it on the owner's. The engine dropped its
    # own reference when `dispatch` ended; without the hold the storage could be given out while it is still read.
    assert alive["dispatch"]
    assert alive["shared"], "held: nothing has waited yet"
    assert not alive["experts"], "let go at the owner's wait"


def masking(module: Any, b: ProgramBuilder) -> None:
    """Two layers whose communication reads a fed value."""
    h, mask = b.input("h"), b.input("mask")
    for index, weight in enumerate(module.weights):
        with b.layer(index):
            (y,) = b.compute("attn", partial(torch.mul, weight), h, outputs=("y",), parameters=(weight,))
            (z,) = b.comm("dispatch", torch.mul, y, mask, outputs=("z",), adjoint=lambda grads, _: (grads[0], None))
            (h,) = b.compute("experts", torch.tanh, z, outputs=("h",))
    b.loss(b.compute("head", torch.sum, h, outputs=("loss",))[0])


def test_a_fed_value_that_another_lane_reads_last_is_held(current: list[FakeStream]) -> None:
    """Only the step holds its copy: without the hold its memory is given out while the transfer reads it."""
    lanes = StreamLanes(torch.device("cpu"))
    last: list[weakref.ref[Tensor]] = []
    alive: list[tuple[str, bool]] = []

    class Look(Watch):
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if last:
                alive.append((str(issue.slot), last.pop()() is not None))

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            if ("mask", 0) in issue.frees:
                last.append(weakref.ref(owner.values["mask", 0]))

    model = Own(masking, weights=nn.ParameterList(torch.ones(4) for _ in range(2)))
    chunk = ModelChunk(model, recompute=RecomputeConfig.uniform(2), lanes=lanes, order="plain")
    train_step(chunk, [{"h": torch.ones(4), "mask": torch.ones(4)}], observers=(Look(lanes),))
    assert alive == [("R0.1.experts", True)]
    assert not lanes._held


class Elsewhere(RoundTrip):
    """A wire, which allocates what it delivers."""

    def round_trip(self, rows: Tensor) -> Tensor:
        return rows.clone()


@pytest.mark.parametrize(("transport", "held"), [(LocalTransport(), False), (Elsewhere(), True)])
def test_what_a_stage_passes_on_is_no_memory_of_its_lane(
    current: list[FakeStream], transport: LocalTransport | RoundTrip, held: bool
) -> None:
    """Rows that stay where they are go when the experts have read them, if the graph keeps nothing of them."""
    lanes = StreamLanes(torch.device("cpu"))
    found: list[bool] = []

    class Look(Watch):
        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            if str(issue.slot).endswith("1.experts") and issue.slot.op is Op.REPLAY:
                rows = owner.values["1.dispatched", 1].untyped_storage()._cdata
                queue = lanes._held.get((Lane.COMM, Lane.COMPUTE), ())
                kept = [leaf for _, value in queue for leaf in pytree.tree_leaves(value) if torch.is_tensor(leaf)]
                found.append(rows in {leaf.untyped_storage()._cdata for leaf in kept})

    model = Decoder(ModelConfig(layers=3, hidden=16, vocab=32), transport=transport)
    train_step(ModelChunk(model, recompute=RecomputeConfig.uniform(1), lanes=lanes), feeds(), observers=(Look(lanes),))
    assert found == [held] * 3


@pytest.mark.parametrize("delay", [False, True])
def test_what_a_graph_keeps_of_another_lane_is_held_after_backward(current: list[FakeStream], delay: bool) -> None:
    """Backward reads what the graph saved of the transfer's result, long after the value itself was freed."""
    lanes = StreamLanes(torch.device("cpu"))
    after: list[bool] = []
    kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
    last = "W" if delay else "B"

    class Look(Watch):
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.slot.op is Op.BACKWARD and issue.stage.label == "1.experts":
                leaf = owner.tapes[issue.stage.key].leaves[0]
                kept[owner.number] = weakref.ref(leaf.untyped_storage())

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.slot.op.value == last and issue.stage.label == "1.experts":
                queue = lanes._held[Lane.COMM, Lane.COMPUTE]
                leaves = [leaf for _, value in queue for leaf in pytree.tree_leaves(value)]
                storages = {leaf.untyped_storage()._cdata for leaf in leaves if torch.is_tensor(leaf)}
                reference = kept[owner.number]()
                after.append(reference is not None and reference._cdata in storages)

    chunk = ModelChunk(
        Decoder(ModelConfig(layers=3, hidden=16, vocab=32), transport=Elsewhere()),
        # Eager: the read in the forward is long over, so only the graph's own use can hold the storage.
        recompute=RecomputeConfig.none(),
        lanes=lanes,
        # Here B.dispatch waits for B.experts, and W.experts comes after: the hold of B is over, W needs its own.
        order="single_queue",
        delay_wgrad=delay,
    )
    train_step(chunk, feeds(), observers=(Look(lanes),))
    assert after == [True] * 3


def test_a_failed_step_leaves_nothing(current: list[FakeStream]) -> None:
    lanes = StreamLanes(torch.device("cpu"))
    chunk = make(RecomputeConfig.uniform(1), lanes)
    contiguous_step(chunk, feeds())

    class Trip(Watch):
        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            if str(issue.slot) == "R0.1.dispatch":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_step(chunk, feeds(), observers=(Trip(lanes),))
    assert not lanes._held
    train_step(chunk, feeds())
