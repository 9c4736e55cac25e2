"""The highest point inside every slot of a step, not only of the step, against the CPU allocator's own events."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import MappingProxyType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from overlap.chunk import ModelChunk
from overlap.engine import Feeds, MicrobatchState
from overlap.lower import Issue
from overlap.memory import fake_chunk, gaps_of, predict_peak, take_footprint, zero_gradients
from overlap.memory.gap import slot_text
from overlap.memory.inside import ON_CPU, Inside
from overlap.memory.oracle import measure_peak
from overlap.memory.predict import Walk
from overlap.memory.slot_log import SlotLog
from overlap.memory.trace import Window
from overlap.memory.tracker import NoLog, StorageTracker
from overlap.step import step_plans, train_step
from tests.memory.compare import decoder, tokens, uniform

_NAME = "slot "
SEQ = 128
SMALL = {"layers": 1, "mhc_iterations": 1}
MODELS = (
    {**SMALL, "mhc": 2, "mtp": 1},
    {**SMALL, "mhc": 2, "hidden": 64, "cut_attention": True},
    {"attention": "gqa", "kv_rank": 16, "dense_layers": 1, "layers": 2},
)
"""The second sums gradients in slots' highest points."""


class Marks:
    """Observer: a mark in the profiler's record around every slot."""

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        self._mark = record_function(_NAME + slot_text(issue, owner.number))
        self._mark.__enter__()

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        self._mark.__exit__(None, None, None)


def measured_tops(chunk: ModelChunk, feeds: list[Feeds]) -> list[tuple[str, int]]:
    zero_gradients(chunk)
    train_step(chunk, feeds)
    zero_gradients(chunk)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(chunk, feeds, observers=(Marks(),))
    tops: list[tuple[str, int]] = []
    level = end = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith(_NAME):
            tops.append((event.name().removeprefix(_NAME), level))
            end = event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]":
            level += event.nbytes()
            if event.start_ns() <= end:
                tops[-1] = (tops[-1][0], max(tops[-1][1], level))
    return tops


def predicted_tops(build, feeds: list[Feeds], inside: Inside = ON_CPU) -> list[tuple[str, int]]:
    with fake_chunk(build) as chunk:
        found = [take_footprint(chunk, feeds[0], (False,), constants=True, inside=inside)] * len(feeds)
        walk = Walk(found, gaps_of(chunk, len(feeds)), delayed=False)
        walk.run(step_plans(chunk, len(feeds)))
        return [(top.slot, top.bytes) for top in walk.tops]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_every_slot_is_exact(model) -> None:
    feeds, build = tokens(1, batch=1, seq=SEQ), partial(decoder, uniform(1), **model)
    assert predicted_tops(build, feeds) == measured_tops(build(), feeds)


def test_what_each_part_is_for(monkeypatch) -> None:
    """Negative controls: without any of them some slot's highest point is another."""
    feeds, build = tokens(1, batch=1, seq=SEQ), partial(decoder, uniform(1), **MODELS[1])
    right = predicted_tops(build, feeds)
    assert predicted_tops(build, feeds, MappingProxyType({})) != right
    log = import_module("overlap.memory.slot_log").SlotLog
    for name in ("made_by", "summed"):
        with monkeypatch.context() as context:
            context.setattr(log, name, lambda self, number: None)
            assert predicted_tops(build, feeds) != right, name


def test_constants_count_from_their_operators_however_many_there_are(monkeypatch) -> None:
    """The second operator takes 1000 bytes within itself: of its own constant none is there yet."""
    nodes = iter((1, 2))
    monkeypatch.setattr(torch._C._autograd, "_get_sequence_nr", lambda: next(nodes))
    log = SlotLog(inside={"second": lambda: 1000})
    log.start()
    for key, operator in ((0, "first"), (1, "second")):
        log.changed(key, 100)
        log.ran(operator, (), {}, None, allocates=True)
    for node in (0, 1):
        log.changed(2 + node, 8)
        log.made_by(node)
    assert log.trace({}) == (Window(rise=1208, change=216, dies=None),)


@pytest.mark.parametrize(("function", "sums"), [(torch.sum, 0), (lambda x: (2 * x).sum(), 1)], ids=("spread", "dense"))
def test_autograd_adds_in_place_into_dense_gradients_only(function, sums) -> None:
    seen: list[int] = []

    class Sums(NoLog):
        def summed(self, key: int) -> None:
            seen.append(key)

    x = torch.ones(5, requires_grad=True)
    with StorageTracker(log=Sums()):
        (function(x) + function(x)).backward()
    assert len(seen) == sums


@pytest.mark.parametrize(("seq", "slot"), [(8, "B0.0.experts"), (64, "N1.0.attn")])
def test_the_highest_point_moves_into_attention_with_length(seq, slot) -> None:
    """There the masks of its softmax count."""
    build = partial(decoder, uniform(1), mhc=2, **SMALL)
    feeds = tokens(2, batch=1, seq=seq)
    predicted = predict_peak(build, feeds)
    assert (predicted.slot, predicted.bytes) == (slot, measure_peak(build(), feeds))
