"""StorageTracker: every tensor storage born while it is active, and when it dies. Works on real and on fake tensors.

Counts storages, not tensors: aliases are free, and a view keeps all of its base alive. What a kernel allocates and
frees within itself is invisible.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap.ir import Op
from overlap.memory.bins import Storage
from overlap.pieces import Piece
from recompute.keep import span
from recompute.wgrad import WeightGradients

OUTSIDE = -1
"""Id of a storage that was not born under the tracker: feeds, parameters, buffers."""


_ENGINE = "torch.autograd.graph"
"""Module that calls autograd's C++ code, and so the dispatch mode when that sums gradients."""
_WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")
"""Modules of what torch puts around a dispatch mode."""
Pending = tuple[WeightGradients, list[tuple[Tensor, Piece]]]
BytesOf = Callable[[Callable[..., Any], Sequence[Any], torch.UntypedStorage], int]


def bytes_of(func: Callable[..., Any], args: Sequence[Any], storage: torch.UntypedStorage) -> int:
    """Size of a storage: what it says itself."""
    return storage.nbytes()


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in a value, in a fixed order: of a tensor, and of tuples, lists and dicts of such (nested)."""
    return [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf)]


def _by_autograd() -> bool:
    """Whether C++ code of autograd called the operator that is being dispatched, and no backward written in Python."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in _WRAPPERS:
        frame = frame.f_back
    name: str = frame.f_globals["__name__"]
    return name == _ENGINE


def _dense(x: Tensor) -> bool:
    return span(x.shape, x.stride()) == x.numel()


def pending_tensors(pending: Iterable[Pending]) -> list[Tensor]:
    """What weight gradients wait with: the weights, and the tensors that they are computed from.

    Args:
        pending: Entries of MicrobatchState.pending.
    """
    waiting = [
        ([(item.weight, item.tensors) for item in collector.pending], [leaf for leaf, _ in leaves])
        for collector, leaves in pending
    ]
    return tensors_of(waiting)


class Log(Protocol):
    """Told of everything that a tracker sees."""

    def changed(self, key: int, nbytes: int) -> None:
        """A storage was born or grew by so many bytes, or died (negative)."""

    def ran(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any], result: Any, *, allocates: bool) -> None:
        """An operator ran; `allocates`: it returned a storage that it made."""

    def summed(self, key: int) -> None:
        """The operator that ran last was autograd's sum of two gradients; the first lies in this storage."""


class NoLog:
    """Nobody listens."""

    def changed(self, key: int, nbytes: int) -> None:
        """Nothing."""

    def ran(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any], result: Any, *, allocates: bool) -> None:
        """Nothing."""

    def summed(self, key: int) -> None:
        """Nothing."""


_NO_LOG = NoLog()


class StorageTracker(TorchDispatchMode):
    """Use as a context; ids are never used twice.

    Args:
        bytes_of: Size of a storage that an operator returned, from the operator, its arguments and the storage.
        log: Told of births, deaths and operators.

    Attributes:
        live: Every live storage, by id.
        current: Operation of the running slot, written into births; `Op.CALL` between slots.
        slot_peak: Bytes; highest live sum reached inside a slot, its temporaries included.
    """

    def __init__(self, bytes_of: BytesOf = bytes_of, log: Log = _NO_LOG) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes_of = bytes_of
        self._log = log
        self.live: dict[int, Storage] = {}
        self.current = Op.CALL
        self.slot_peak = 0
        self._bytes = 0
        self._ids: dict[int, int] = {}
        self._next = 0

    def ids_of(self, value: object) -> list[int]:
        """Storage ids of the tensors in a value, one per tensor; OUTSIDE where the storage is not tracked."""
        return [self._ids.get(tensor.untyped_storage()._cdata, OUTSIDE) for tensor in tensors_of(value)]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator and note the storages that it allocated."""
        keywords = kwargs or {}
        if func is torch.ops.prim.device.default:
            # Half of what a fake tensor is asked; allocates nothing.
            return func(*args, **keywords)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, keywords))}
        result = func(*args, **keywords)
        allocates = False
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            # A storage that the operator was given and nobody saw before is a feed's or a parameter's.
            if storage._cdata in self._ids or storage._cdata not in inputs:
                self._note(storage, self._bytes_of(func, args, storage))
            allocates = allocates or storage._cdata not in inputs
        self._log.ran(func, args, keywords, result, allocates=allocates)
        if func is torch.ops.aten.add.Tensor and _by_autograd() and _dense(args[0]):
            self._log.summed(self._ids.get(args[0].untyped_storage()._cdata, OUTSIDE))
        return result

    def note(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that no operator returned, as a constant in a graph."""
        storage = tensor.untyped_storage()
        self._note(storage, storage.nbytes())

    def _note(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        address = storage._cdata
        if address not in self._ids:
            self._ids[address] = self._next
            self._set(self._next, Storage(nbytes, self.current))
            weakref.finalize(storage, self._forget, address, self._next).atexit = False
            self._next += 1
        elif nbytes > self.live[self._ids[address]].nbytes:
            # An `out=` operator may enlarge the storage of an empty tensor.
            self._set(self._ids[address], Storage(nbytes, self.live[self._ids[address]].born))

    def _set(self, key: int, storage: Storage) -> None:
        change = storage.nbytes - (self.live[key].nbytes if key in self.live else 0)
        self._bytes += change
        self._log.changed(key, change)
        self.live[key] = storage
        if self.current is not Op.CALL:
            self.slot_peak = max(self.slot_peak, self._bytes)

    def _forget(self, address: int, key: int) -> None:
        del self._ids[address]
        nbytes = self.live.pop(key).nbytes
        self._bytes -= nbytes
        self._log.changed(key, -nbytes)
