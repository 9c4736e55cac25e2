"""Random numbers: a replay draws what the first pass drew, whatever ran in between."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, Op, reference_step, train_step
from overlap.controls import NoRng
from overlap.engine import Feeds, MicrobatchState
from overlap.lower import Issue
from recompute import RecomputeConfig
from tests.cases.model import (
    FIRST,
    B,
    U,
    Watcher,
    assert_equals_reference,
    different,
    make_chunk,
    make_feeds,
    routed_by_pass,
    run,
)

# The package exports a function of the same name.
dropout_module = import_module("overlap.model.dropout")
Draws = dict[tuple[int, int | None, str], dict[bool, list[Tensor]]]
"""By microbatch, layer and stage: what was drawn in the first pass (True) and later (False)."""


def drawn_masks(
    monkeypatch: pytest.MonkeyPatch, chunk: ModelChunk, feeds: list[Feeds], **settings: Any
) -> tuple[Draws, Watcher]:
    """Every dropout mask of a step."""
    watcher = Watcher()
    masks: Draws = defaultdict(lambda: {True: [], False: []})
    real = dropout_module.dropout_noise

    def noise(like: Tensor, p: float) -> Tensor:
        result: Tensor = real(like, p)
        if watcher.slot is not None:
            masks[watcher.slot[1:]][watcher.slot[0] in FIRST].append(result)
        return result

    monkeypatch.setattr(dropout_module, "dropout_noise", noise)
    train_step(chunk, feeds, observers=(watcher,), **settings)
    return masks, watcher


@pytest.mark.parametrize("rule", [U(1), U(3), B(2)], ids=str)
def test_dropout(rule: RecomputeConfig) -> None:
    """Row 1: residual dropout 0.1, one microbatch: EQ with the reference, masks included."""
    chunk, feeds = make_chunk(rule, dropout=0.1, attention_dropout=0.1), make_feeds(1)
    expected = assert_equals_reference(chunk, feeds)
    assert different(expected, run(make_chunk(rule), feeds, reference_step)) != [], "dropout changes nothing"
    broken = different(expected, run(chunk, feeds, engine_type=NoRng))
    assert any(name.startswith("gradients:") for name in broken)
    assert not any(name.startswith("losses:") for name in broken)


def test_masks_of_replay_and_adjoint_are_those_of_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1: `attn` draws its mask again in the replay, `post` in its adjoint."""
    masks, _ = drawn_masks(monkeypatch, make_chunk(U(1), dropout=0.1), make_feeds(1))
    assert set(masks) == {(0, layer, stage) for layer in range(4) for stage in ("attn", "post")}
    for draws in masks.values():
        (first,), (again,) = draws[True], draws[False]
        assert torch.equal(first, again)
    assert not torch.equal(masks[0, 0, "attn"][True][0], masks[0, 1, "attn"][True][0])


def test_masks_differ_when_the_replay_draws_from_the_live_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1: negative control of the test above."""
    masks, _ = drawn_masks(monkeypatch, make_chunk(U(1), dropout=0.1), make_feeds(1), engine_type=NoRng)
    assert not any(torch.equal(draws[True][0], draws[False][0]) for draws in masks.values())


def test_router_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 2: noise on the router's input: the replay routes as the first pass did, at the same probabilities."""
    chunk, feeds = make_chunk(U(1), jitter=0.1), make_feeds(2)
    expected = assert_equals_reference(chunk, feeds)
    assert different(expected, run(make_chunk(U(1)), feeds, reference_step)) != [], "jitter changes nothing"
    assert different(expected, run(chunk, feeds, engine_type=NoRng)) != []
    found = routed_by_pass(monkeypatch, chunk, feeds)
    assert set(found) == {(mb, layer, "attn") for mb in range(2) for layer in range(4)}
    for first, again in found.values():
        assert torch.equal(first.routing.expert_ids, again.routing.expert_ids)
        assert torch.equal(first.probs, again.probs)


def test_router_jitter_drawn_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 2: negative control of the comparison of probabilities."""
    found = routed_by_pass(monkeypatch, make_chunk(U(1), jitter=0.1), make_feeds(2), engine_type=NoRng)
    assert not any(torch.equal(first.probs, again.probs) for first, again in found.values())


def test_interleaved_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 3: the next microbatch's forward runs between forward and replay of one; masks match per microbatch."""
    chunk, feeds = make_chunk(U(1), dropout=0.1), make_feeds(4)
    assert_equals_reference(chunk, feeds)
    masks, watcher = drawn_masks(monkeypatch, chunk, feeds)
    log = watcher.log
    for mb in range(3):
        replay = log.index((Op.REPLAY, mb, 0, "attn"))
        assert log.index((Op.NO_GRAD, mb, 0, "attn")) < log.index((Op.NO_GRAD, mb + 1, 0, "attn")) < replay
    assert set(masks) == {(mb, layer, stage) for mb in range(4) for layer in range(4) for stage in ("attn", "post")}
    for draws in masks.values():
        assert torch.equal(draws[True][0], draws[False][0])
    assert not torch.equal(masks[0, 0, "attn"][True][0], masks[1, 0, "attn"][True][0])


def test_no_slot_moves_the_live_generator() -> None:
    """Row 3: the generator is after every slot, replays included, as before the step."""
    start = torch.get_rng_state()
    moved: list[str] = []

    def check(issue: Issue, owner: MicrobatchState) -> None:
        if not torch.equal(torch.get_rng_state(), start):
            moved.append(str(issue.slot))

    watcher = Watcher(check)
    feeds = make_feeds(4)
    train_step(make_chunk(U(1), dropout=0.1), feeds, observers=(watcher,))
    assert moved == []
    assert sum(slot[0] is Op.REPLAY for slot in watcher.log) == 4 * 4 * 4  # attn, shared, dispatch, experts
    train_step(make_chunk(U(1), dropout=0.1), feeds, observers=(watcher,), engine_type=NoRng)
    assert moved != []
