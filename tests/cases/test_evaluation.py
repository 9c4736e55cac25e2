"""Forward-only runs: nothing kept, replayed or counted, and training goes on as if they had not happened."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

from overlap import ModelChunk, Op, forward_only, reference_step, train_step
from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.verify import compare
from recompute import RecomputeConfig
from tests.cases.model import NONE, B, Box, U, Watcher, different, make_chunk, make_feeds, outcome, saved_tensors


def evaluate(chunk: ModelChunk, count: int = 1) -> list[dict[str, Any]]:
    """Evaluate in eval mode under no_grad, through train_step's own door."""
    chunk.eval()
    with torch.no_grad():
        losses = [train_step(chunk, make_feeds(1, seed=90 + n))[0] for n in range(count)]
    chunk.train()
    return losses


@pytest.mark.parametrize("rule", [U(1), U(3), B(2), NONE], ids=str)
def test_evaluation_between_training_steps(rule: RecomputeConfig) -> None:
    """Row 64: three evaluations, a step, one more, a step: as the run without evaluations, bit for bit."""
    feeds = [make_feeds(2, seed=s) for s in (0, 1)]
    with_evals, without = make_chunk(rule, dropout=0.1), make_chunk(rule, dropout=0.1)
    evaluate(with_evals, 3)
    first = train_step(with_evals, feeds[0])
    evaluate(with_evals)
    second = train_step(with_evals, feeds[1])
    expected = [*reference_step(without, feeds[0]), *reference_step(without, feeds[1])]
    assert different(outcome(without, expected), outcome(with_evals, [*first, *second])) == []
    stale = make_chunk(rule, dropout=0.1)
    train_step(stale, feeds[0])
    assert different(outcome(stale, []), outcome(with_evals, [])) != [], "the comparison sees a missing step"


def test_evaluation_equals_a_plain_forward() -> None:
    """Row 64: losses of eval mode are those of the reference without dropout; counters and steps stay."""
    chunk = make_chunk(U(1), dropout=0.1)
    before = {name: buffer.clone() for name, buffer in chunk.module.named_buffers()}
    (found,) = evaluate(chunk)
    plain = copy.deepcopy(chunk).eval()
    (expected,) = reference_step(plain, make_feeds(1, seed=90))
    assert compare(expected, found).different == ()
    assert compare(before, dict(chunk.module.named_buffers())).different == ()
    assert chunk.steps_done == 0
    (dropped,) = reference_step(copy.deepcopy(chunk), make_feeds(1, seed=90))
    assert compare(expected, dropped).different != ()


def test_nothing_is_kept_after_an_evaluation() -> None:
    """Row 64: no segment input outlives a forward-only run."""
    alive: dict[str, weakref.ref] = {}

    def note(issue: Issue, owner: MicrobatchState) -> None:
        for key in issue.writes:
            if key is not None and torch.is_tensor(owner.values[key]) and key[0] not in owner.outputs:
                alive[key[0]] = weakref.ref(owner.values[key])

    chunk = make_chunk(U(1))
    losses = forward_only(chunk, make_feeds(2), observers=(Watcher(note),))
    assert {"embedded", "0.hidden", "3.hidden", "0.tokens"} <= set(alive)
    assert [name for name, ref in alive.items() if ref() is not None] == []
    assert len(losses) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("rule", [U(1), B(2)], ids=str)
def test_training_mode_without_gradients(rule: RecomputeConfig, mode: Any) -> None:
    """Row 66: under no_grad, in training mode: no replay, no graph, nothing retained; dropout as in a step."""
    chunk, feeds, watcher = make_chunk(rule, dropout=0.1), make_feeds(2), Watcher()
    saved: list[weakref.ref[Box]] = []
    with saved_tensors(lambda box: saved.append(weakref.ref(box))), mode():
        losses = train_step(chunk, feeds, observers=(watcher,))
    assert {slot[0] for slot in watcher.log} == {Op.NO_GRAD}
    assert saved == []
    assert not any(loss.requires_grad for mb in losses for loss in mb.values())
    assert all(p.grad is None for p in chunk.parameters())
    assert all(not b.any() for name, b in chunk.module.named_buffers() if name.endswith("tokens_per_expert"))
    expected = reference_step(copy.deepcopy(chunk), feeds)
    assert all(compare(a, b).different == () for a, b in zip(expected, losses, strict=True))


def test_training_mode_with_gradients_saves() -> None:
    """Row 66: negative control: a training step does save tensors and replay."""
    saved: list[weakref.ref[Box]] = []
    watcher = Watcher()
    with saved_tensors(lambda box: saved.append(weakref.ref(box))):
        train_step(make_chunk(U(1)), make_feeds(1), observers=(watcher,))
    assert saved != []
    assert watcher.replayed_layers(0) == [3, 2, 1, 0]
