"""Snapshots of buffers that a stage changes in place (running statistics, scales, histories).

The first pass changes them, as it would without recompute; a replay must see what the first pass saw and leave
nothing behind. What a graph saves of them is a copy: it must not read what another microbatch made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from recompute.errors import RecomputeError

Snapshot = tuple[Tensor, ...]


def take(buffers: Sequence[Tensor]) -> Snapshot:
    """Copy the buffers as they are."""
    return tuple(buffer.detach().clone() for buffer in buffers)


def put(buffers: Sequence[Tensor], snapshot: Snapshot) -> None:
    """Write a snapshot back.

    Through `.data`, which counts as no change: a graph that saved a buffer itself reads what is put here, unnoticed.
    So the graphs of stages that change buffers save copies, see saving_copies().
    """
    with torch.no_grad():
        for buffer, value in zip(buffers, snapshot, strict=True):
            buffer.data.copy_(value)


@contextmanager
def as_of(buffers: Sequence[Tensor], snapshot: Snapshot) -> Iterator[None]:
    """Show the buffers as `snapshot` has them inside; afterwards they are as they were, whatever was written.

    A graph made inside saves copies of them.
    """
    live = take(buffers)
    put(buffers, snapshot)
    try:
        with saving_copies(buffers):
            yield
    finally:
        put(buffers, live)


@contextmanager
def saving_copies(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Have a graph that is made inside save copies of these buffers and of views of them, as they are at the time.

    Between a stage's forward and its backward other microbatches move its buffers on. Everything else is saved as
    ever, and by the hooks that were there before. A custom Function must save a buffer with save_for_backward.
    """
    own = {buffer.untyped_storage()._cdata for buffer in buffers}
    # Hooks do not add up, the last ones count.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = (_hold, _release) if outer is None else outer

    def pack_copy(tensor: Tensor) -> object:
        return pack(tensor.detach().clone() if tensor.untyped_storage()._cdata in own else tensor)

    with saved_tensors_hooks(pack_copy, unpack):
        yield


_Held = tuple[Tensor, int]
"""A saved tensor without its graph, which would hold itself, and its version."""


def _hold(tensor: Tensor) -> _Held:
    return tensor.detach(), tensor._version


def _release(held: _Held) -> Tensor:
    """Give a tensor back if it is as it was: behind hooks autograd does not look."""
    tensor, version = held
    if tensor._version != version:
        raise RecomputeError(
            f"a tensor of shape {tuple(tensor.shape)} that a stage saved for its backward has been changed in place"
        )
    return tensor
