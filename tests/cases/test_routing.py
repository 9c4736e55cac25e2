"""Routing is pinned: a replay never chooses experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, reference_step, train_step
from overlap.engine import Engine
from overlap.model import Router
from recompute import RecomputeConfig
from tests.cases.model import NONE, B, U, UnpinnedReplay, different, make_chunk, make_feeds, outcome, routed_by_pass


class Alternating:
    """Top-k that breaks ties the other way at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, scores: Tensor, k: int) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        turned = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return scores.shape[-1] - 1 - turned


def tied_chunk(rule: RecomputeConfig, ties: str) -> tuple[ModelChunk, list[Alternating]]:
    """M0 whose scores tie, each router with its own adversarial selection; returns the selections too."""
    chunk = make_chunk(rule)
    chunk.checked = True  # the check would call the selections once, and turn their order
    selections = []
    for router in chunk.modules():
        if isinstance(router, Router):
            with torch.no_grad():
                if ties == "all":
                    router.weight.zero_()
                else:
                    router.weight[2] = router.weight[1]
            selection = Alternating()
            router.select = selection
            selections.append(selection)
    return chunk, selections


def run_tied(rule: RecomputeConfig, ties: str, step: Any = train_step, **settings: Any) -> tuple[Any, list[int]]:
    """Outcome of a step of a fresh model, and how often each router chose."""
    chunk, selections = tied_chunk(rule, ties)
    torch.manual_seed(7)
    found = outcome(chunk, step(chunk, make_feeds(2), **settings))
    return found, [selection.calls for selection in selections]


@pytest.mark.parametrize("ties", ["all", "two identical rows"])
@pytest.mark.parametrize("rule", [U(1), U(3), B(2), NONE], ids=str)
def test_tied_scores(rule: RecomputeConfig, ties: str) -> None:
    """Row 17: a selection that turns ties round at each call is asked once per microbatch and layer; EQ."""
    expected, calls = run_tied(NONE, ties, reference_step)
    assert calls == [2] * 4
    found, calls = run_tied(rule, ties)
    assert calls == [2] * 4
    assert different(expected, found) == []


@pytest.mark.parametrize("ties", ["all", "two identical rows"])
def test_tied_scores_chosen_again(ties: str) -> None:
    """Row 17: negative control: without the pinned choice ties flip and gradients differ."""
    expected, _ = run_tied(NONE, ties, reference_step)
    found, calls = run_tied(U(1), ties, engine_type=UnpinnedReplay)
    assert calls == [4] * 4
    assert any(name.startswith("gradients:") for name in different(expected, found))


@pytest.mark.parametrize("engine_type", [Engine, UnpinnedReplay])
def test_map_and_splits_of_the_replay(engine_type: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 17: choice, permutation and splits of the replay are the first pass's; with the control they are not."""
    chunk, _ = tied_chunk(U(1), "all")
    found = routed_by_pass(monkeypatch, chunk, make_feeds(1), engine_type=engine_type)
    assert len(found) == 4
    for first, again in found.values():
        for name in ("expert_ids", "source", "inverse", "counts"):
            same = torch.equal(getattr(first.routing, name), getattr(again.routing, name))
            assert same == (engine_type is Engine), name
