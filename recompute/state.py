"""Snapshots of buffers that a stage changes in place (running statistics, scales, histories).

The first pass changes them, as it would without recompute; a replay must see what the first pass saw and leave
nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Snapshot = tuple[Tensor, ...]


def take(buffers: Sequence[Tensor]) -> Snapshot:
    """Copy the buffers as they are."""
    return tuple(buffer.detach().clone() for buffer in buffers)


def put(buffers: Sequence[Tensor], snapshot: Snapshot) -> None:
    """Write a snapshot back.

    Through `.data`: a graph that saved a buffer must not see this as a change made behind its back, since every
    replay puts the values back before anything else reads them.
    """
    with torch.no_grad():
        for buffer, value in zip(buffers, snapshot, strict=True):
            buffer.data.copy_(value)


@contextmanager
def as_of(buffers: Sequence[Tensor], snapshot: Snapshot) -> Iterator[None]:
    """Show the buffers as `snapshot` has them inside; afterwards they are as they were, whatever was written."""
    live = take(buffers)
    put(buffers, snapshot)
    try:
        yield
    finally:
        put(buffers, live)
