"""Sequences: who sees whom, what is ahead, against loops; rotary positions and attention over cut rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.model import ModelConfig, init_weights
from overlap.model.attention import ATTENTIONS
from overlap.model.precision import default_dtype
from overlap.model.rope import Rotary
from overlap.model.sequences import Sequences, as_sequences, sequence_feeds

# two rows of 8: sequences of 5 and 3; of 1, 4 and 3
ENDS = torch.tensor([0, 5, 8, 9, 13, 16])
NUMBER = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2], [3, 4, 4, 4, 4, 5, 5, 5]])
PADDING = torch.tensor([[0, 0, 0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 1, 1]], dtype=torch.bool)
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 0, 1, 2, 3, 0, 1, 2]])


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("ends", [None, ENDS, ENDS.int()])
def test_mask_equals_a_loop(padding: Tensor | None, ends: Tensor | None) -> None:
    mask = Sequences(padding, ends).mask(torch.empty(2, 8, 3))
    if padding is None and ends is None:
        assert mask is None
        return
    assert mask is not None
    assert mask.shape == (2, 1, 8, 8)
    for b in range(2):
        for q in range(8):
            for k in range(8):
                same = ends is None or NUMBER[b, q] == NUMBER[b, k]
                real = padding is None or not padding[b, k] or q == k
                assert bool(mask[b, 0, q, k]) == bool(k <= q and same and real)


@pytest.mark.parametrize("ends", [None, ENDS])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_ahead_equals_a_loop(ends: Tensor | None, steps: int) -> None:
    x = torch.randint(9, (2, 8))
    found = Sequences(cu_seqlens=ends).ahead(x, steps, fill=-1)
    for b in range(2):
        for s in range(8):
            inside = s + steps < 8 and (ends is None or NUMBER[b, s] == NUMBER[b, s + steps])
            assert found[b, s] == (x[b, s + steps] if inside else -1)


def test_ahead_by_two_is_ahead_by_one_twice() -> None:
    """Row B7: a depth computed from its number equals the cumulative roll of depth after depth."""
    sequences = Sequences(cu_seqlens=ENDS)
    x = torch.randint(9, (2, 8))
    once = sequences.ahead(x, 1, fill=0)
    assert torch.equal(sequences.ahead(once, 1, fill=0), sequences.ahead(x, 2, fill=0))


def test_padding_at_a_depth() -> None:
    """The mask moves with the tokens; past the end all is padding. What was fed stays as it is."""
    before = PADDING.clone()
    moved = Sequences(PADDING, ENDS).at_depth(2)
    assert torch.equal(PADDING, before)
    assert moved.padding_mask is not None
    assert moved.padding_mask.tolist() == [
        [False, False, True, True, True, True, True, True],
        [True, False, False, True, True, True, True, True],
    ]
    assert moved.cu_seqlens is ENDS
    assert Sequences(cu_seqlens=ENDS).at_depth(1).padding_mask is None


def test_feeds_of_a_config() -> None:
    assert sequence_feeds(ModelConfig()) == ()
    assert sequence_feeds(ModelConfig(padding=True)) == ("padding_mask",)
    assert sequence_feeds(ModelConfig(padding=True, packed=True)) == ("padding_mask", "cu_seqlens", "positions")
    assert as_sequences(("cu_seqlens",), (ENDS,)) == Sequences(None, ENDS, None)


def attention(kind: str) -> Any:
    shape: dict[str, Any] = {"mla": {"kv_rank": 6}, "gqa": {"kv_heads": 2, "head_dim": 4}}[kind]
    config = ModelConfig(hidden=12, heads=4, dtype="float64", attention=kind, **shape)
    with default_dtype(torch.float64):
        module = ATTENTIONS[config.attention](config, Rotary(config))
    init_weights(module, 0)
    return module


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_packed_rows_equal_their_sequences_alone(kind: str) -> None:
    """Batch above 1: each sequence of a packed row comes out as if it had been a row of its own."""
    module = attention(kind)
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    packed = module(x, Sequences(cu_seqlens=ENDS, positions=POSITIONS))
    flat, alone = packed.flatten(0, 1), x.flatten(0, 1)
    for first, last in zip(ENDS[:-1].tolist(), ENDS[1:].tolist(), strict=True):
        torch.testing.assert_close(flat[first:last], module(alone[None, first:last])[0])


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_padding_is_not_attended_to(kind: str) -> None:
    module = attention(kind)
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    other = torch.where(PADDING.unsqueeze(-1), torch.randn_like(x), x)
    before, after = (module(rows, Sequences(PADDING)) for rows in (x, other))
    assert torch.equal(before[~PADDING], after[~PADDING])
    assert not torch.equal(before[PADDING], after[PADDING])
    assert before.isfinite().all()
    end = torch.arange(8) >= 5
    padded = module(x, Sequences(end.expand(2, 8)))
    torch.testing.assert_close(padded[:, :5], module(x[:, :5]))


def test_positions_are_read() -> None:
    rotary = Rotary(ModelConfig(dtype="float64"))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(rotary(x), rotary(x, torch.arange(8).expand(2, 8)))
    moved = rotary(x, POSITIONS)
    for b in range(2):
        for s in range(8):
            place = int(POSITIONS[b, s])
            alone = rotary(x[b, :, s].unsqueeze(1).expand(3, place + 1, 8))[:, place]
            assert torch.equal(moved[b, :, s], alone)
