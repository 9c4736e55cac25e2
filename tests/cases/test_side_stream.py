"""Work on side streams: in a real step each use is behind its write, and no memory goes back before its last use.

The streams are stand-ins that know what they wait for; races on real ones are looked for in tests/gpu.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, Op, get_order, reference_step, train_step
from overlap.dispatch import LocalTransport, Transport
from overlap.dispatch.round_trip import RoundTrip
from overlap.engine import MicrobatchState
from overlap.ir import SETTLING, Lane
from overlap.lanes import Lanes, NullLanes, Owner
from overlap.lower import Issue
from overlap.model import Decoder
from overlap.streams import Mark, StreamLanes
from recompute import Keep, RecomputeConfig, Replay
from tests.cases.clocked_streams import CheckedLanes, ClockedStream, use_clocked_streams
from tests.cases.model import NONE, B, Outcome, U, Watcher, different, m0, make_feeds, outcome, run, saved_tensors

HIDDEN = U(1, replay=Replay.HIDDEN)
SHAPES: dict[str, dict[str, Any]] = {
    "shared expert": {"layers": 3, "shared_width": 8, "dropout": 0.1},
    "residual streams": {"layers": 2, "shared_width": 8, "dropout": 0.1, "mtp": 1, "mhc": 2, "mhc_iterations": 2},
}
"""Three layers each: an MTP depth is one."""


class Wire(RoundTrip):
    """A network, which allocates what it delivers."""

    def round_trip(self, rows: Tensor) -> Tensor:
        return rows.clone()


WIRE = Wire()


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clocked_streams(monkeypatch)


def make(
    shape: str, rule: RecomputeConfig, order: str, lanes: Lanes, *, delay: bool, transport: Transport = WIRE
) -> ModelChunk:
    model = Decoder(m0(**SHAPES[shape]), transport=transport)
    chosen = get_order(order, rule.replay)
    return ModelChunk(model, recompute=rule, order=chosen, delay_wgrad=delay, lanes=lanes)


@cache
def reference(shape: str) -> Outcome:
    """What plain autograd leaves; rules and orders have no part in it."""
    return run(make(shape, NONE, "multi_queue", NullLanes(), delay=False), make_feeds(3), reference_step)


def step(chunk: ModelChunk, lanes: CheckedLanes) -> Outcome:
    """A step whose lanes see what graphs save."""
    # No check of the declarations: it runs stages outside the lanes, and takes a third of the time.
    chunk.checked = True
    torch.manual_seed(7)
    with saved_tensors(lanes.save):
        return outcome(chunk, train_step(chunk, make_feeds(3)))


def assert_clean(
    shape: str, rule: RecomputeConfig, order: str, *, delay: bool, transport: Transport = WIRE
) -> ModelChunk:
    """A step that races nowhere, does work on side streams and equals plain autograd bit for bit."""
    lanes = CheckedLanes()
    chunk = make(shape, rule, order, lanes, delay=delay, transport=transport)
    found = step(chunk, lanes)
    assert lanes.faults == []
    assert lanes.foreign > 30
    assert different(reference(shape), found) == []
    return chunk


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("order", ["multi_queue", "single_queue"])
@pytest.mark.parametrize("rule", [NONE, U(1), U(2), B(2), HIDDEN, U(1, keep=Keep.HOST)], ids=str)
def test_transfers_on_a_side_stream(rule: RecomputeConfig, order: str, delay: bool) -> None:
    """Row 47, B19: forward, backward and replay of a layer with a shared expert fork and join where they must."""
    assert_clean("shared expert", rule, order, delay=delay)


@pytest.mark.parametrize(("order", "delay"), [("multi_queue", False), ("single_queue", True)])
@pytest.mark.parametrize("rule", [NONE, U(1), B(2), U(2, replay=Replay.HIDDEN)], ids=str)
def test_residual_streams_are_mixed_on_the_compute_stream(rule: RecomputeConfig, order: str, delay: bool) -> None:
    """B22: what a replay allocates on one stream and another one reads, an MTP depth's included."""
    chunk = assert_clean("residual streams", rule, order, delay=delay)
    mixers = [stage for stage in chunk.program.stages if stage.name in ("post", "mtp_post")]
    assert [stage.label for stage in mixers] == ["0.post", "1.post", "2.post", "2.mtp_post"]
    assert {stage.lane for stage in mixers} == {Lane.COMPUTE}


def test_rows_that_stay_are_memory_of_the_compute_stream() -> None:
    assert_clean("shared expert", HIDDEN, "multi_queue", delay=True, transport=LocalTransport())


def test_a_step_that_fails_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has waited for the transfer that ran last: the caller's stream does."""

    def fail(issue: Issue, owner: MicrobatchState) -> None:
        if (issue.slot.op, issue.stage.label) == (Op.REPLAY, "1.dispatch"):
            raise KeyboardInterrupt

    def faults() -> list[str]:
        lanes = CheckedLanes()
        chunk = make("shared expert", U(1), "multi_queue", lanes, delay=False)
        with pytest.raises(KeyboardInterrupt):
            train_step(chunk, make_feeds(2), observers=(Watcher(fail),))
        return lanes.faults

    assert faults() == []
    monkeypatch.setattr(ClockedStream, "wait_stream", nothing)
    assert "compute is not joined with comm after the step" in faults()


class Changed(CheckedLanes):
    """Control: runs plans with a fault in them."""

    def __init__(self, change: Callable[[Issue], Issue]) -> None:
        super().__init__()
        self._change = change

    def begin(self, issue: Issue, owner: Owner) -> None:
        super().begin(self._change(issue), owner)


def without_replays_foreign(issue: Issue) -> Issue:
    return replace(issue, foreign=()) if issue.slot.op is Op.REPLAY else issue


def kinds(faults: list[str]) -> Counter[str]:
    """How often each fault was found, microbatches and layers taken together."""
    return Counter(re.sub(r"\b([A-Z])\d\.\d", r"\1", fault) for fault in faults)


SLOTS = 3 * 3
"""Microbatches times layers."""


@pytest.mark.parametrize(
    ("change", "shape", "rule", "delay", "expected"),
    [
        (lambda issue: replace(issue, foreign_leaves=()), "shared expert", NONE, False,
         {"F.dispatch goes back while B.experts": 2 * SLOTS}),
        (lambda issue: replace(issue, pending_owners=()), "shared expert", NONE, True,
         {"F.dispatch goes back while W.experts": SLOTS, "B.combine goes back while W.experts": SLOTS}),
        (without_replays_foreign, "residual streams", U(1), False,
         {"R.attn goes back while R.dispatch": 2 * SLOTS, "R.experts goes back while R.combine": SLOTS}),
        (without_replays_foreign, "residual streams", HIDDEN, True,
         {"R.attn goes back while R.dispatch": 2 * SLOTS, "R.experts goes back while R.combine": SLOTS}),
    ],
    ids=["a graph's inputs", "a pending gradient's", "a replay's", "a hidden replay's"],
)  # fmt: skip
def test_memory_that_nobody_holds_is_seen(
    change: Callable[[Issue], Issue], shape: str, rule: RecomputeConfig, delay: bool, expected: dict[str, int]
) -> None:
    """Rows 47, B19 and B22, negative controls: lowering announced one kind of use no more.

    The rows and their weights, or the gradient that came back.
    """
    lanes = Changed(change)
    step(make(shape, rule, "multi_queue", lanes, delay=delay), lanes)
    assert kinds(lanes.faults) == {f"memory of {text} uses it": times for text, times in expected.items()}


def let_settled_go(lanes: StreamLanes) -> None:
    """Lets go as if lanes had waited."""
    lanes.enter(Lane.COMPUTE)
    for lane in SETTLING:
        lanes._held.pop((lane, Lane.COMPUTE), None)


@pytest.mark.parametrize(("rule", "ops"), [(NONE, "FBW"), (HIDDEN, "NRBW")], ids=str)
def test_a_plan_without_waits_is_seen(rule: RecomputeConfig, ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 47, negative control: each use on another stream is found, of forward, backward and replay."""
    monkeypatch.setattr(StreamLanes, "settle", lambda lanes: lanes.enter(Lane.COMPUTE))
    lanes = Changed(lambda issue: replace(issue, waits=()))
    step(make("shared expert", rule, "multi_queue", lanes, delay=True), lanes)
    assert all("does not wait for" in fault for fault in lanes.faults)
    assert len(lanes.faults) == lanes.foreign > 30
    assert {fault[0] for fault in lanes.faults} == set(ops)


def nothing(*args: Any) -> None:
    """Stands for a call that was forgotten."""


def let_all_go(lanes: StreamLanes, lane: Lane, mark: Mark) -> None:
    """A release that does not look at the mark."""
    lanes._held.pop((lane, mark.lane), None)


@pytest.mark.parametrize(
    ("owner", "name", "instead", "expected"),
    [
        (StreamLanes, "_hold", nothing, "memory of F0.0.attn goes back while F0.0.dispatch uses it"),
        (StreamLanes, "_release", let_all_go, "memory of F0.0.attn goes back while B0.0.dispatch uses it"),
        (ClockedStream, "wait_event", nothing, "F0.0.dispatch does not wait for F0.0.attn"),
        (ClockedStream, "wait_stream", nothing, "comm is not joined with compute before the step"),
        (ClockedStream, "wait_stream", nothing, "copy is not joined with compute after the step"),
        (StreamLanes, "settle", let_settled_go, "memory of B2.0.dispatch goes back while B2.0.attn uses it"),
    ],
)
def test_lanes_that_forget_are_seen(
    owner: type, name: str, instead: Callable[..., None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 47, B19, negative controls of StreamLanes itself: no holds, all holds gone at a wait, no waits, no join."""
    monkeypatch.setattr(owner, name, instead)
    lanes = CheckedLanes()
    step(make("shared expert", NONE, "multi_queue", lanes, delay=False), lanes)
    assert expected in lanes.faults
