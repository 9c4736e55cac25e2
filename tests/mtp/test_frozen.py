"""R6: shared parameters are frozen one by one; what is frozen has no gradient made, and its readers rebuild as ever."""

from __future__ import annotations

import pytest

from overlap import ModelChunk
from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.step import train_step
from recompute import RecomputeConfig
from tests.mtp.tools import NONE, U, chunk_feeds, different, gradients_of, make, reference_gradients

PARTS = RecomputeConfig.selective("layernorm", "mla_up_proj")
BLOCK = "mtp.0.layer.attn"
WEIGHTS = [f"{BLOCK}.norm.weight", f"{BLOCK}.attention.latent_norm.weight", f"{BLOCK}.attention.key_value.weight"]


class GradientsMade:
    """Notes the values that a piece of gradient is kept for."""

    def __init__(self) -> None:
        self.values: set[str] = set()

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        pass

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        self.values |= {value for value, _ in owner.grads}


def freeze(chunk: ModelChunk, name: str) -> None:
    chunk.module.get_parameter(name).requires_grad_(False)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_repeated_depth_with_one_frozen_weight(name: str, delay: bool) -> None:
    """Parts rebuilt in backward find what they saved: a frozen weight's product saves less."""
    chunk = make(PARTS, delay=delay, layers=1, mtp=2, mtp_repeat=True)
    freeze(chunk, name)
    feeds = chunk_feeds(chunk, 2)
    expected = reference_gradients(chunk, feeds)
    assert expected[name] is None
    assert different(expected, gradients_of(chunk, feeds)) == ()


@pytest.mark.parametrize("rule", [NONE, U(1)], ids=str)
@pytest.mark.parametrize(
    ("settings", "frozen", "trains"),
    [
        ({"tied": True, "mtp": 1}, "embedding", "weight.final_norm"),
        ({"mtp": 2, "mtp_repeat": True}, WEIGHTS[0], f"weight.{WEIGHTS[2].replace('mtp.0', 'mtp')}"),
    ],
    ids=["tied", "repeated"],
)
def test_no_gradient_is_made_for_a_frozen_one(
    settings: dict[str, object], frozen: str, trains: str, rule: RecomputeConfig
) -> None:
    """A tied embedding's would be as large as the embedding, once per reader, and wait for the end of backward."""
    chunk = make(rule, layers=1, **settings)
    feeds = chunk_feeds(chunk, 1)
    value = f"weight.{frozen.replace('mtp.0', 'mtp')}"
    seen = []
    for each in (False, True):
        if each:
            freeze(chunk, frozen)
        expected = reference_gradients(chunk, feeds)
        chunk.zero_grad()
        made = GradientsMade()
        train_step(chunk, feeds, observers=(made,))
        assert different(expected, {name: p.grad for name, p in chunk.module.named_parameters()}) == ()
        seen.append((value in made.values, trains in made.values))
    assert seen == [(True, True), (False, True)]


def test_a_stage_that_reads_frozen_ones_only_keeps_no_graph() -> None:
    """The tied embedding is frozen, the repeated depth trains: nothing is left to learn before the first layer."""
    chunk = make(U(1), layers=1, tied=True, mtp=1, mtp_repeat=True)
    freeze(chunk, "embedding")
    assert (None, "embed") not in chunk.program.trained()
    feeds = chunk_feeds(chunk, 2)
    assert different(reference_gradients(chunk, feeds), gradients_of(chunk, feeds)) == ()
