"""Feeds that do not fit the model are refused before anything runs, naming the feed and the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.model.feeds import check_feeds
from overlap.reference import reference_step
from overlap.step import forward_only, train_step
from recompute.errors import ConfigError
from tests.mtp.tools import chunk_feeds, feeds_for, make, tiny

FULL = {"padding": True, "packed": True, "mtp": 2}
IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("ids", IDS.int(), "must be int64 of shape"),
        ("ids", IDS[0], "must be int64 of shape"),
        ("ids", [1, 2], "must be int64 of shape"),
        ("ids", IDS[:0], r"torch.int64 \(0, 8\)': must hold at least one row and one position"),
        ("ids", IDS[:, :0], r"torch.int64 \(2, 0\)': must hold at least one row and one position"),
        ("ids", IDS + 32, r"\[32, 32\]: must lie in 0 to vocab - 1 \(31\)"),
        ("ids", IDS - 1, r"\[-1, -1\]: must lie in 0"),
        ("labels", IDS[:, :7], "of the shape of ids"),
        ("labels", IDS.float(), "must be torch.int64"),
        ("labels", IDS, "must be -100 .* where padding_mask says"),
        ("labels", IDS + 32, r"\[32, 32\]: must be -100 \(no loss\) or lie in 0 to vocab - 1 \(31\)"),
        ("labels", IDS - 1, r"\[-1, -1\]: must be -100"),
        ("labels", IDS + 10**12, "must be -100 .* or lie in 0"),
        ("padding_mask", IDS, "must be torch.bool"),
        ("padding_mask", IDS[0].bool(), "of the shape of ids"),
        ("padding_mask", IDS.flatten().bool(), "of the shape of ids"),
        ("padding_mask", None, "of the shape of ids"),
        ("positions", IDS.int(), "must be torch.int64"),
        ("positions", IDS - 1, "must lie in 0 to max_seq - 1"),
        ("positions", IDS + 64, r"must lie in 0 to max_seq - 1 \(63\)"),
        ("cu_seqlens", torch.tensor([0, 8, 15]), r"number of tokens \(16\): packed lengths sum to it"),
        ("cu_seqlens", torch.tensor([0, 8, 17]), "packed lengths sum to it"),
        ("cu_seqlens", torch.tensor([1, 8, 16]), "must run from 0"),
        ("cu_seqlens", torch.tensor([0, 8, 8, 16]), "no sequence is empty"),
        ("cu_seqlens", torch.tensor([0, 5, 3, 8, 16]), "must increase"),
        ("cu_seqlens", torch.tensor([0, 6, 16]), "at each row's end"),
        ("cu_seqlens", torch.tensor([[0, 8, 16]]), r"of shape \[sequences \+ 1\]"),
        ("cu_seqlens", torch.tensor([0.0, 8.0, 16.0]), "must be int32 or int64"),
        ("cu_seqlens", torch.tensor([0]), r"of shape \[sequences \+ 1\]"),
        ("cu_seqlens", [0, 8, 16], "must be int32 or int64"),
    ],
)
def test_bad_feeds(name: str, value: Any, rule: str) -> None:
    config = tiny(**FULL)
    (feeds,) = feeds_for(config, 1)
    if name != "labels":
        feeds = {**feeds, "labels": torch.full_like(IDS, -100)}
    else:
        feeds = {**feeds, "padding_mask": torch.arange(8).expand(2, 8) > 5}
    with pytest.raises(ConfigError, match=f"{name}=.*{rule}") as raised:
        check_feeds(config, {**feeds, name: value})
    assert raised.value.field == name


def test_good_feeds() -> None:
    config = tiny(**FULL)
    for feeds in feeds_for(config, 5, batch=3):
        check_feeds(config, feeds)
        check_feeds(config, {**feeds, "cu_seqlens": feeds["cu_seqlens"].int()})
    check_feeds(tiny(labels=False), {"ids": IDS})


def test_a_depth_beyond_the_sequence() -> None:
    config = tiny(mtp=3)
    check_feeds(config, feeds_for(config, 1, length=4)[0])
    with pytest.raises(ConfigError, match=r"mtp=3: must be below the sequence length \(3\)"):
        check_feeds(config, feeds_for(config, 1, length=3)[0])


def test_a_sequence_beyond_the_tables() -> None:
    config = tiny(max_seq=7)
    with pytest.raises(ConfigError, match=r"max_seq=7: .*\(8\)"):
        check_feeds(config, feeds_for(config, 1)[0])


@pytest.mark.parametrize("step", [train_step, reference_step, forward_only])
def test_every_step_checks_and_names_the_microbatch(step: Any) -> None:
    chunk = make(padding=True)
    first, second = chunk_feeds(chunk, 2)
    with pytest.raises(ConfigError, match="padding_mask") as raised:
        step(chunk, [first, {**second, "padding_mask": second["padding_mask"].float()}])
    assert raised.value.__notes__ == ["in microbatch 1 of the step"]
    assert all(parameter.grad is None for parameter in chunk.parameters())
