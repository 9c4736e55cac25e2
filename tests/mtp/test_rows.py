"""Random cuts of rows: every feed fits the model, and no target crosses an end."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap.model.feeds import check_feeds
from overlap.model.head import IGNORED
from overlap.model.sequences import Sequences
from overlap.training.rows import cut_rows
from tests.mtp.tools import tiny


@given(
    padding=st.booleans(),
    packed=st.booleans(),
    batch=st.integers(1, 4),
    length=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_cut_rows(padding: bool, packed: bool, batch: int, length: int, seed: int) -> None:
    config = tiny(vocab=64, padding=padding, packed=packed)
    tokens = torch.arange(batch * (length + 1)).view(batch, length + 1)
    feeds = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    before = {name: value.clone() for name, value in feeds.items()}
    generator = torch.Generator().manual_seed(seed)
    state = generator.get_state()
    cut: dict[str, Any] = cut_rows(feeds, config, generator)
    check_feeds(config, cut)
    assert all(torch.equal(feeds[name], before[name]) for name in before)
    assert torch.equal(generator.get_state(), state) == (not padding and not packed)
    sequences = Sequences(cut.get("padding_mask"), cut.get("cu_seqlens"), cut.get("positions"))
    # the next token, where one follows in the same sequence and neither is padding
    following = sequences.ahead(cut["ids"], 1, fill=IGNORED)
    mask = torch.zeros_like(cut["ids"], dtype=torch.bool) if sequences.padding_mask is None else sequences.padding_mask
    following = following.masked_fill(mask | sequences.ahead(mask, 1, fill=padding), IGNORED)
    wanted = following if padding or packed else before["labels"]
    assert torch.equal(cut["labels"], wanted)
    if packed:
        starts = cut["positions"] == 0
        assert int(starts.sum()) == len(cut["cu_seqlens"]) - 1
