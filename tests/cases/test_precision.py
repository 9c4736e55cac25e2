"""Rows of kind PREC: low precision whose state moves, under replay by the scheduler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from overlap import ModelChunk, forward_only, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.engine import Engine
from overlap.errors import ProgramError
from overlap.model import Decoder
from overlap.verify import verify
from recompute import RecomputeConfig, Replay
from tests.cases.model import B, U, different, m0, make_feeds, run
from tests.cases.quantised import (
    HistoryExperts,
    Region,
    RoundedExperts,
    StandInBackend,
    StepExperts,
    region_backend,
)

LAYERS = 3
RULES = [U(1), U(2), B(2), RecomputeConfig.uniform(1, replay=Replay.HIDDEN)]


def make(backend: StandInBackend, rule: RecomputeConfig, **changes: Any) -> ModelChunk:
    delay = changes.pop("delay_wgrad", False)
    return ModelChunk(backend.convert(Decoder(m0(layers=LAYERS, **changes))), recompute=rule, delay_wgrad=delay)


def experts_of(chunk: ModelChunk) -> list[Any]:
    return [module for module in chunk.modules() if isinstance(module, RoundedExperts)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_scale_that_moves_with_every_forward(rule):
    """Row 6: the replay of microbatch i sees its own first pass's scale; the live scale ends as the reference's."""
    chunk = make(StandInBackend(RoundedExperts), rule)
    feeds = make_feeds(3)
    assert different(run(chunk, feeds, reference_step), run(chunk, feeds)) == []
    chunk.checked = True
    train_step(chunk, feeds)
    recomputed = range(LAYERS) if rule.method == "uniform" else range(2)
    for layer, module in enumerate(experts_of(chunk)):
        assert len({float(scale) for scale in module.seen}) == 3
        assert len(module.seen) == (6 if layer in recomputed else 3)


def test_a_moving_scale_on_the_contiguous_path():
    """Row 6: the same for plain checkpointing."""
    chunk = make(StandInBackend(RoundedExperts), U(2))
    feeds = make_feeds(2)
    assert different(run(chunk, feeds, reference_step), run(chunk, feeds, contiguous_step)) == []


def test_control_without_declared_state_goes_wrong():
    """Row 6: the same with a stash of live references, which the next forward moves, is seen."""

    class Undeclared(RoundedExperts):
        state = ()

    chunk = make(StandInBackend(Undeclared), U(1))
    feeds = make_feeds(3)
    expected, found = copy.deepcopy(chunk), copy.deepcopy(chunk)
    found.checked = True
    reference_step(expected, feeds)
    train_step(found, feeds)
    assert not torch.equal(experts_of(expected)[0].scale, experts_of(found)[0].scale)
    weights = zip(expected.parameters(), found.parameters(), strict=True)
    assert not all(torch.equal(a.grad, b.grad) for a, b in weights if a.grad is not None and b.grad is not None)


def test_an_undeclared_scale_is_refused():
    """Row 10: whatever it is called, a buffer that moves in forward is found before the first step."""

    class Undeclared(RoundedExperts):
        state = ()

    with pytest.raises(ProgramError, match=r"changes buffer .*scale' in place"):
        train_step(make(StandInBackend(Undeclared), U(1)), make_feeds(2))


@pytest.mark.parametrize("rule", [U(2), B(2)], ids=str)
def test_a_history_gets_one_entry_per_microbatch(rule):
    """Row 10: after a step of m microbatches a history of 4 holds exactly m new entries, the reference's."""
    chunk = make(StandInBackend(HistoryExperts), rule, mtp=1)
    feeds = make_feeds(2)
    assert different(run(chunk, feeds, reference_step), run(chunk, feeds)) == []
    train_step(chunk, feeds)
    for module in experts_of(chunk):
        assert int(module.pushes) == 2
        assert int((module.history != 0).sum()) == 2


@pytest.mark.parametrize(("rule", "delay_wgrad"), [(U(1), False), (U(2), True), (RULES[3], True)], ids=str)
def test_scales_that_move_once_per_step(rule, delay_wgrad):
    """Rows 6 and 10: constant scales within a step, one entry per step with the maximum of all its microbatches."""
    chunk = make(StandInBackend(StepExperts), rule, delay_wgrad=delay_wgrad, mtp=1)
    verdict = verify(chunk, [make_feeds(3, seed) for seed in range(2)])
    assert verdict.equal, verdict
    train_step(chunk, make_feeds(3, 0))
    for module in experts_of(chunk):
        assert {float(scale) for scale in module.seen} == {1.0}
        assert int((module.history != 0).sum()) == 1
        assert float(module.scale) == float(module.history[0]) > 1.0
        assert float(module.amax) == 0.0


def test_control_that_moves_within_a_step_differs():
    """Rows 6 and 10: scales that move when a slot ends, as process-wide lists do, are seen."""
    chunk = make(StandInBackend(StepExperts), U(1))
    feeds = make_feeds(3)
    expected, found = copy.deepcopy(chunk), copy.deepcopy(chunk)

    class Moves(Engine):
        def _replay(self, issue: Any, owner: Any) -> None:
            super()._replay(issue, owner)
            for module in experts_of(found):
                module.advance()

    reference_step(expected, feeds)
    train_step(found, feeds, engine_type=Moves)
    assert not torch.equal(experts_of(expected)[0].history, experts_of(found)[0].history)


def test_neither_evaluation_nor_a_failed_step_moves_scales():
    """Row 10: nothing of a run without backward, or of a step that fails, reaches a history."""
    chunk = make(StandInBackend(StepExperts), U(1))
    feeds = make_feeds(2)
    train_step(chunk, feeds)
    before = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    with torch.no_grad():
        forward_only(chunk, feeds)

    class Fails(Engine):
        def _backward(self, issue: Any, owner: Any) -> None:
            if issue.slot.layer == 1:
                raise RuntimeError("on purpose")
            super()._backward(issue, owner)

    with pytest.raises(RuntimeError, match="on purpose"):
        train_step(chunk, feeds, engine_type=Fails)
    assert all(torch.equal(buffer, before[name]) for name, buffer in chunk.named_buffers())
    chunk.zero_grad()
    assert different(run(chunk, feeds, reference_step), run(chunk, feeds)) == []


class Outside(Engine):
    """Control: a replay does not enter the stage's context."""

    def _contexts(self, issue: Any, owner: Any) -> Any:
        contexts = super()._contexts(issue, owner)
        return contexts[1:] if issue.slot.op.value == "R" and issue.stage.context is not None else contexts


@pytest.mark.parametrize("rule", [U(1), B(2)], ids=str)
def test_the_region_is_entered_again_by_the_replay(rule):
    """Row 8: every layer, MTP's too, replays in the region of its first pass, first in it as there; then it is left."""
    region = Region()
    chunk = make(region_backend(region, leave_out=1), rule, mtp=1)
    feeds = make_feeds(2)
    assert different(run(chunk, feeds, reference_step), run(chunk, feeds)) == []
    region.log.clear()
    chunk.checked = True
    train_step(chunk, feeds)
    assert (region.on, region.first) == (False, False)
    replayed = {"uniform": LAYERS + 1, "block": 2}[str(rule.method)]
    assert len(region.log) == 2 * (LAYERS + 1 + replayed)
    outside = [entry for entry in region.log if not entry[0]]
    assert len(outside) == 2 * 2, "layer 1, first pass and replay"
    assert all(first for on, first, _ in region.log if on)


def test_control_without_the_region_differs():
    """Row 8: a replay that runs in full precision, silently, is seen."""
    chunk = make(region_backend(Region()), U(1))
    assert not verify(chunk, [make_feeds(2)], engine_type=Outside).equal
