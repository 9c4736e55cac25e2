"""Routing: the pinned choice of experts and the order that sorts token copies by expert.

Owns indices only, never scores: whoever holds a Routing can permute, dispatch and undo both without choosing again.
Legend: T tokens, k experts per token, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_INT16 = torch.iinfo(torch.int16).max


class Routing(NamedTuple):
    """Where each of the T*k token copies goes. N rows are sent; indices of rows are int32.

    Without a capacity N is T*k. With a capacity of K rows N is E*K: rows e*K to e*K+K-1 are expert e's, whatever the
    choice, so that every size is known beforehand; copies that find no row are dropped and weigh nothing.
    """

    expert_ids: Tensor
    """[T, k] int64: the experts of each token, distinct within a row."""
    source: Tensor
    """[N] int32: for each row in expert order, the copy it holds, numbered token*k + slot; T*k where it holds none."""
    token: Tensor
    """[N] int32: the token of that copy; T where there is none."""
    inverse: Tensor
    """[T*k] int32: for each copy, its row in expert order, N where it was dropped; undoes `source`."""
    counts: Tensor
    """[E] int64: copies that chose each expert, dropped ones included."""
    ends: Tensor
    """[E] int32: where each expert's rows end, as grouped products take it."""
    covers: bool = True
    """Whether the counts sum to T*k. If not, the rows behind them belong to padding and to no expert."""
    capacity: int | None = None
    """K: rows of each expert; None: one for every copy."""

    @property
    def topk(self) -> int:
        """Copies per token."""
        return self.expert_ids.shape[1]


def make_routing(
    expert_ids: Tensor, num_experts: int, padding: Tensor | None = None, capacity: int | None = None
) -> Routing:
    """Sort the copies by expert, stably: within an expert they stay in token order.

    Copies of padding come last; no expert counts them.

    Every size follows from shapes, so this runs on fake tensors and never waits for a device.

    Args:
        expert_ids: [T, k] int64, values in [0, num_experts).
        num_experts: E.
        padding: [T] bool, True for tokens that no expert shall see; None: there are none.
        capacity: Rows of each expert; the first copies in token order get them. None: as many as it takes.
    """
    flat = expert_ids.flatten()
    if padding is not None:
        flat = torch.where(padding.repeat_interleave(expert_ids.shape[1]), num_experts, flat)
    # A radix sort takes a pass for every few bits, and expert numbers fit 16.
    narrow = flat.to(torch.int16) if num_experts < _INT16 else flat
    keys, order = torch.sort(narrow, stable=True)
    # Where each expert's copies begin among the sorted ones, and where those of the last end: no sum, and no host.
    experts = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    begins = torch.searchsorted(keys, experts)
    copies = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    inverse = torch.empty_like(copies).scatter_(0, order, copies)
    if capacity is None:
        source, ends = order.to(torch.int32), begins[1:].to(torch.int32)
    else:
        place = inverse - begins[flat]
        rows = num_experts * capacity
        row = torch.where((place < capacity) & (flat < num_experts), flat * capacity + place, rows)
        # one row more takes the dropped copies, whichever comes last
        source = copies.new_full((rows + 1,), flat.numel()).scatter_(0, row, copies)[:rows].clone()
        inverse, ends = row.to(torch.int32), experts[1:].to(torch.int32) * capacity
    topk = expert_ids.shape[1]
    token = source if topk == 1 else source // topk
    covers = padding is None or capacity is not None
    return Routing(expert_ids, source, token, inverse, begins.diff(), ends, covers, capacity)
