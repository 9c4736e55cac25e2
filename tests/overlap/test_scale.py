"""Factors on the losses."""

from __future__ import annotations

import pytest
import torch

from overlap.scale import PerMicrobatch, PerToken
from recompute import ConfigError

LABELS = [{"labels": torch.tensor([1, 2, -100])}, {"labels": torch.tensor([-100, 4, 5])}]


@pytest.mark.parametrize(("count", "accumulate", "factor"), [(1, 1, 1.0), (4, 1, 0.25), (2, 2, 0.25), (3, 5, 1 / 15)])
def test_per_microbatch(count: int, accumulate: int, factor: float) -> None:
    """Row 57: one over the microbatches of all calls."""
    assert PerMicrobatch().factor([{}] * count, accumulate, None) == factor


def test_per_microbatch_takes_no_token_count() -> None:
    with pytest.raises(ConfigError, match="total_tokens=8: only a per-token loss scale takes it"):
        PerMicrobatch().factor([{}], 1, 8)


def test_per_token_counts_labels() -> None:
    assert PerToken().factor(LABELS, 1, None) == 0.25
    assert PerToken(ignore_index=5).factor(LABELS, 1, None) == 0.2


def test_a_step_without_tokens_has_a_finite_scale() -> None:
    assert PerToken().factor([{"labels": torch.tensor([-100])}], 1, None) == 1.0
    assert PerToken().factor(LABELS, 1, 0) == 1.0


def test_several_calls_need_the_total() -> None:
    with pytest.raises(ConfigError, match="total_tokens=None: a per-token loss over several train_step calls"):
        PerToken().factor(LABELS, 2, None)
    assert PerToken().factor(LABELS, 2, 10) == 0.1


@pytest.mark.parametrize("tokens", [-1, True, 2.0, "8"])
def test_a_token_count_is_an_integer(tokens) -> None:
    with pytest.raises(ConfigError, match=r"total_tokens=.*: must be an integer of at least 0"):
        PerToken().factor(LABELS, 1, tokens)


def test_labels_name_a_feed() -> None:
    with pytest.raises(
        ConfigError, match=r"labels='target': must name a feed that holds the labels: one of \['labels'\]"
    ):
        PerToken(labels="target").factor(LABELS, 1, None)
