"""Where a segment input waits for its replay: host memory, or the memory of other ranks.

Only bytes move: a tensor comes back with its shape, its strides and every bit, as far from an aligned address as it
was: a matrix product may round differently for another alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from recompute.config import Keep

# torch 2.13 renamed it, and warns of the old name.
_all_gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)


ALIGNED = 64
"""Bytes: what allocators align to at least, and what kernels look at."""


class Store(Protocol):
    """Takes flat tensors in and gives them back; runs on whatever stream is current."""

    def put(self, flat: Tensor) -> Tensor:
        """What stands for `flat` [n] until it is wanted again."""

    def get(self, kept: Tensor, length: int, device: torch.device) -> Tensor:
        """The first `length` elements are those that were put in; on `device`, in memory of their own."""


class HostStore:
    """Host memory, pinned where the tensor is on a GPU, so that both copies run beside kernels."""

    def put(self, flat: Tensor) -> Tensor:
        """Copy out."""
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.is_cuda)
        return host.copy_(flat, non_blocking=True)

    def get(self, kept: Tensor, length: int, device: torch.device) -> Tensor:
        """Copy in."""
        return torch.empty(length, dtype=kept.dtype, device=device).copy_(kept, non_blocking=True)


class Sharded:
    """One part on each rank of a group whose ranks all hold the same segment inputs (tensor parallelism).

    Args:
        group: The ranks; None: all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """Copies of a model use the same group."""
        return self

    def put(self, flat: Tensor) -> Tensor:
        """Keep this rank's part, padded to the same length on every rank."""
        size = shard_length(flat.shape[0], self.ranks)
        part = flat.new_zeros(size)
        mine = flat[self._rank * size : (self._rank + 1) * size]
        part[: mine.shape[0]] = mine
        return part

    def get(self, kept: Tensor, length: int, device: torch.device) -> Tensor:
        """Gather the parts of all ranks, in place.

        gloo's own gather makes copies of the whole on a thread of its own and holds its input a moment longer: how much
        memory there is would depend on which thread is ahead. So on a CPU every rank broadcasts its part.
        """
        size = kept.shape[0]
        whole = kept.new_empty(size * self.ranks)
        parts = [whole[rank * size : (rank + 1) * size] for rank in range(self.ranks)]
        parts[self._rank].copy_(kept)
        if device.type == "cpu":
            for rank, part in enumerate(parts):
                dist.broadcast(part, group=self._group, group_src=rank)
        else:
            _all_gather(whole, parts[self._rank], group=self._group)
        return whole


Stores = Mapping[Keep, Store]
HOST_ONLY: Stores = MappingProxyType({Keep.HOST: HostStore()})
"""What works without a process group."""


class Parked(NamedTuple):
    """A tensor that waits elsewhere."""

    kept: Tensor
    length: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    skip: int
    device: torch.device


def park(value: Any, store: Store) -> Any:
    """Put the tensors of a value into a store; the rest of it stays as it is.

    Args:
        value: A tensor, or tuples, lists and dicts of them.
        store: Where to.
    """
    return tree_map_only(Tensor, lambda tensor: _park(tensor, store), value)


def fetch(parked: Any, store: Store) -> Any:
    """A value as `park` took it, in new memory."""
    return tree_map(lambda leaf: _fetch(leaf, store) if _is_parked(leaf) else leaf, parked, is_leaf=_is_parked)


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor in its storage, gaps included; 0 if it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def shard_length(length: int, ranks: int) -> int:
    """Elements of each rank's part."""
    return -(-length // ranks)


def lead_in(tensor: Tensor) -> int:
    """Elements between the last aligned address before a tensor and the tensor; 0 if it is empty."""
    return int(tensor.storage_offset()) % (ALIGNED // tensor.element_size()) if tensor.numel() else 0


def copied_feed(tensor: Tensor) -> Tensor:
    """A copy without the graph; of numbers that may round it lies as the tensor does: strides, gaps, alignment."""
    rounds = tensor.layout is torch.strided and (tensor.is_floating_point() or tensor.is_complex())
    if not rounds:
        return tensor.detach().clone()
    shape, stride, skip = tuple(tensor.shape), tensor.stride(), lead_in(tensor)
    if not skip and span(shape, stride) == tensor.numel():
        return tensor.detach().clone()
    return _flat(tensor).clone().as_strided(shape, stride, skip)


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a tensor from the last aligned address on."""
    skip = lead_in(tensor)
    length = skip + span(tuple(tensor.shape), tensor.stride())
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset() - skip)


def _park(tensor: Tensor, store: Store) -> Parked:
    flat = _flat(tensor)
    place = tuple(tensor.shape), tensor.stride(), lead_in(tensor)
    return Parked(store.put(flat), flat.shape[0], *place, tensor.device)


def _fetch(parked: Parked, store: Store) -> Tensor:
    flat = store.get(parked.kept, parked.length, parked.device)
    return flat.as_strided(parked.shape, parked.stride, parked.skip)


def _is_parked(leaf: Any) -> bool:
    return type(leaf) is Parked
