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
    """Where each of the T*k token copies goes. All tensors are int64; N rows are sent.

    Without a capacity N is T*k. With a capacity of K rows N is E*K: rows e*K to e*K+K-1 are expert e's, whatever the
    choice, so that every size is known beforehand; copies that find no row are dropped and weigh nothing.
    """

    expert_ids: Tensor
    """[T, k]: the experts of each token, distinct within a row."""
    source: Tensor
    """[N]: for each row in expert order, the copy it holds, numbered token*k + slot; T*k where it holds none."""
    inverse: Tensor
    """[T*k]: for each copy, its row in expert order, N where it was dropped; undoes `source`."""
    counts: Tensor
    """[E]: copies that chose each expert, dropped ones included."""
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
    source = torch.argsort(narrow, stable=True)
    inverse = torch.empty_like(source).scatter_(0, source, torch.arange(flat.numel(), device=flat.device))
    chosen = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    counts = chosen[:num_experts].clone()
    if capacity is None:
        return Routing(expert_ids, source, inverse, counts, padding is None)
    place = inverse - (chosen.cumsum(0) - chosen)[flat]
    rows = num_experts * capacity
    inverse = torch.where((place < capacity) & (flat < num_experts), flat * capacity + place, rows)
    # one row more takes the dropped copies, whichever comes last
    held = flat.new_full((rows + 1,), flat.numel()).scatter_(0, inverse, torch.arange(flat.numel(), device=flat.device))
    return Routing(expert_ids, held[:rows].clone(), inverse, counts, True, capacity)
