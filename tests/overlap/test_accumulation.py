"""Calls of one optimizer step scale their losses alike, or are refused before anything runs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from overlap import ModelChunk, PerToken
from overlap import accumulation as calls
from overlap.engine import Engine
from overlap.reference import reference_step
from overlap.step import train_step
from recompute import ConfigError
from tests.overlap.programs import differences, result_of, tiny_chunk, tiny_feeds

STEPS = [train_step, reference_step]
SHORT = r"microbatches=1: the calls before had 3: up to the one with last=True all must scale their losses alike"


class Broken(Engine):
    """Fails in its first plan."""

    def run(self, *_: Any) -> None:
        raise ValueError("inside")


@pytest.mark.parametrize("step", STEPS)
def test_a_call_of_another_length_is_refused(step: Any) -> None:
    """Row 57: the sum would be no mean over all microbatches; the calls can go on with as many as before."""
    chunk, once, feeds = tiny_chunk("M"), tiny_chunk("M"), tiny_feeds(6)
    step(once, feeds)
    step(chunk, feeds[:3], 2, last=False)
    for last in (False, True):
        before = copy.deepcopy(result_of(chunk))
        with pytest.raises(ConfigError, match=SHORT) as raised:
            step(chunk, feeds[3:4], 2, last=last)
        assert raised.value.field == "microbatches"
        assert differences(before, result_of(chunk)) == []
    step(chunk, feeds[3:], 2)
    assert differences(result_of(once), result_of(chunk)) == []
    step(chunk, feeds[:1])


def test_the_same_scale_by_other_numbers_is_a_mean() -> None:
    """Two microbatches, then two calls of one: 1/4 each."""
    once, parts = (tiny_chunk("M", shape={}) for _ in range(2))
    feeds = tiny_feeds(4)
    train_step(once, feeds)
    train_step(parts, feeds[:2], 2, last=False)
    train_step(parts, feeds[2:3], 4, last=False)
    train_step(parts, feeds[3:], 4)
    assert differences(result_of(once), result_of(parts)) == []


def test_another_number_of_calls_is_refused() -> None:
    chunk, feeds = tiny_chunk("M"), tiny_feeds(2)
    train_step(chunk, feeds[:1], 2, last=False)
    with pytest.raises(ConfigError, match=r"accumulate=3: the calls before had 2"):
        train_step(chunk, feeds[1:], 3)


def test_lengths_do_not_matter_to_a_loss_per_token() -> None:
    """Its scale is one over all tokens, which have to be the same number in every call."""
    chunk, feeds = tiny_chunk("M"), tiny_feeds(4)
    chunk.loss_scale = PerToken()
    train_step(chunk, feeds[:3], 2, last=False, total_tokens=40)
    with pytest.raises(ConfigError, match=r"total_tokens=41: the calls before had 40"):
        train_step(chunk, feeds[3:], 2, total_tokens=41)
    train_step(chunk, feeds[3:], 2, total_tokens=40)


@pytest.mark.parametrize("failing", [0, 1], ids=["first", "second"])
def test_a_failed_call_ends_the_calls_before(failing: int) -> None:
    """Gradients are undefined then: they are zeroed, and another optimizer step begins, of any length."""
    chunk, feeds = tiny_chunk("M"), tiny_feeds(3)
    for _ in range(failing):
        train_step(chunk, feeds, 2, last=False)
    with pytest.raises(ValueError, match="inside"):
        train_step(chunk, feeds, 2, last=False, engine_type=Broken)
    for parameter in chunk.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    train_step(chunk, feeds[:1], 2, last=False)
    with pytest.raises(ConfigError, match=r"microbatches=3: the calls before had 1"):
        train_step(chunk, feeds, 2)


def test_calls_without_their_gradients_are_forgotten() -> None:
    """An optimizer step that was given up: `zero_grad()` is where another one begins."""
    chunk, feeds = tiny_chunk("M"), tiny_feeds(3)
    train_step(chunk, feeds, 2, last=False)
    chunk.zero_grad()
    train_step(chunk, feeds[:1], 2, last=False)
    with pytest.raises(ConfigError, match=r"microbatches=3: the calls before had 1"):
        train_step(chunk, feeds, 2)


def test_evaluation_in_between_does_not_count() -> None:
    chunk, feeds = tiny_chunk("M"), tiny_feeds(4)
    train_step(chunk, feeds[:3], 2, last=False)
    with torch.no_grad():
        train_step(chunk, feeds[:1])
    with pytest.raises(ConfigError, match=SHORT):
        train_step(chunk, feeds[3:], 2)


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    def begin() -> ModelChunk:
        chunk = tiny_chunk("M")
        train_step(chunk, tiny_feeds(1), 2, last=False)
        return chunk

    before = len(calls._begun)
    chunk = begin()
    assert len(calls._begun) == before + 1
    del chunk
    gc.collect()
    assert len(calls._begun) == before
