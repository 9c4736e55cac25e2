"""Rows of each expert padded to a multiple, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlap.model.row_padding import make_padding


def by_hand(x: Tensor, splits: list[int], multiple: int) -> Tensor:
    parts, start = [], 0
    for split in splits:
        part = x[start : start + split]
        short = -split % multiple
        parts.append(torch.cat((part, x.new_zeros(short, *x.shape[1:]))))
        start += split
    return torch.cat(parts)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_pad_and_unpad(splits, multiple, rest, wide):
    rows = sum(splits) + rest
    x = torch.arange(1, rows * 2 + 1, dtype=torch.float64).view(rows, 2)
    x = x if wide else x[:, 0].contiguous()
    padding = make_padding(torch.tensor(splits), splits, rows, multiple)
    padded = padding.pad(x)
    assert torch.equal(padded, by_hand(x, splits, multiple))
    assert padding.splits == tuple(-(-split // multiple) * multiple for split in splits)
    back = padding.unpad(padded)
    assert torch.equal(back[: sum(splits)], x[: sum(splits)])
    assert not back[sum(splits) :].any()


@pytest.mark.parametrize("rest", [0, 2])
def test_each_is_the_others_backward(rest):
    splits = [3, 0, 5]
    padding = make_padding(torch.tensor(splits), splits, 8 + rest, 4)
    x = torch.randn(8 + rest, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(padding.pad, (x,))
    assert torch.autograd.gradcheck(padding.unpad, (y,))
    assert torch.equal((padding.pad(x) * y).sum(), (padding.pad(x) * padding.pad(padding.unpad(y))).sum())


def test_nothing_to_pad_moves_nothing():
    x = torch.randn(8, 2)
    padding = make_padding(torch.tensor([4, 4]), [4, 4], 8, 4)
    assert padding.pad(x) is x
    assert padding.unpad(x) is x
