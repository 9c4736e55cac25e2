"""What waits elsewhere comes back with every bit, its shape and its strides, in memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.check import same_bits
from recompute.keep import HostStore, Parked, copied_feed, fetch, lead_in, park, shard_length, span

LAYOUTS: Mapping[str, Tensor] = {
    "plain": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "slice with gaps": torch.arange(24.0).view(4, 6)[1:, ::2],
    "not aligned": torch.arange(25.0)[1:].view(2, 3, 4),
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 5),
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
    "empty rows": torch.empty(2, 0),
    "ids": torch.arange(6).view(2, 3),
    "narrow": torch.arange(6, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_bits_come_back(name: str) -> None:
    value = LAYOUTS[name]
    parked = park(value, HostStore())
    back = fetch(parked, HostStore())
    assert same_bits(back, value)
    assert back.stride() == value.stride()
    assert lead_in(back) == lead_in(value)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (value, parked.kept, back) if tensor.numel()}
    assert len(storages) == (3 if value.numel() else 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_of_what_is_fed_lies_alike(name: str) -> None:
    value = LAYOUTS[name]
    copy = copied_feed(value)
    assert same_bits(copy, value)
    assert (copy.stride(), lead_in(copy)) == (value.stride(), lead_in(value))
    assert not copy.numel() or copy.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_ids_are_copied_without_gaps() -> None:
    assert copied_feed(torch.arange(24).view(4, 6)[:, 1:3]).untyped_storage().nbytes() == 8 * 8


def test_only_the_span_of_a_view_is_kept() -> None:
    whole = torch.zeros(100, 10)
    assert park(whole[40:42, :5], HostStore()).kept.numel() == 15
    assert span((3, 5), (1, 0)) == 3
    assert span((0, 5), (5, 1)) == span((2, 0), (1, 1)) == 0


def test_values_may_be_nested() -> None:
    value = {"a": (torch.ones(2), 3, "text"), "b": [torch.zeros(1), None]}
    parked: Any = park(value, HostStore())
    assert type(parked["a"][0]) is Parked
    back: Any = fetch(parked, HostStore())
    assert torch.equal(back["a"][0], torch.ones(2))
    assert back["a"][1:] == (3, "text")
    assert back["b"][1] is None


def test_a_tensor_with_a_graph_leaves_it_behind() -> None:
    value = torch.ones(2, requires_grad=True) * 2
    assert not fetch(park(value, HostStore()), HostStore()).requires_grad


def test_parts_cover_the_whole() -> None:
    for length in range(9):
        for ranks in range(1, 5):
            size = shard_length(length, ranks)
            assert size * ranks >= length > size * ranks - ranks - (length == 0)
