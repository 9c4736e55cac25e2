"""Ledger: who holds which storage, and bytes by kind, kept up to date with every hold. Never imports torch.

Says of storages named by ids what `kinds_of` says of sets, at the price of what changed and not of all that is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import TypeVar

from overlap.memory.bins import FOR_REPLAY, Bin, Storage

Ids = tuple[int, ...]
"""Storage ids, one per tensor of a value; those that the ledger does not know are not counted."""
Part = tuple[Bin, str]
"""A kind, and the stage in which its storages were born."""

_CLAIMS = (Bin.HOST_INPUTS, Bin.SEGMENT_INPUTS, Bin.PINNED_ROUTING, Bin.PENDING_WGRAD)
"""Kinds that a holder gives a storage, the strongest first; without one it is a live segment's or the rest."""
K = TypeVar("K")
V = TypeVar("V")
Holds = Iterable[tuple[int, Bin | None]]
"""Storages with the kind that their holder gives them."""


class Ledger:
    """Storages, from birth until nothing holds them.

    Attributes:
        parts: Bytes by kind and stage of birth.
        total: Bytes of all kinds, what does not count left out.
    """

    def __init__(self) -> None:
        self.parts: dict[Part, int] = {}
        self.total = 0
        self._storages: dict[int, Storage] = {}
        self._away: set[int] = set()
        self._holders: dict[int, int] = {}
        self._claims: dict[int, dict[Bin, int]] = {}
        self._loose: set[int] = set()
        """Those without a holder: dead at the next `forget`."""

    def add(self, key: int, storage: Storage, *, counts: bool = True) -> None:
        """A storage is born; `counts`: as part of `total`."""
        self._storages[key] = storage
        self._holders[key] = 0
        self._loose.add(key)
        self._move(key, 1)
        if counts:
            self.total += storage.nbytes
        else:
            self._away.add(key)

    def hold(self, holds: Holds) -> None:
        """Somebody holds these."""
        for key, kind in holds:
            if key in self._storages:
                self._holders[key] += 1
                self._loose.discard(key)
                if kind is not None:
                    self.claim(key, kind, 1)

    def release(self, holds: Holds) -> None:
        """Somebody who held these does so no longer."""
        for key, kind in holds:
            if key in self._storages:
                self._holders[key] -= 1
                if not self._holders[key]:
                    self._loose.add(key)
                if kind is not None:
                    self.claim(key, kind, -1)

    def claim(self, key: int, kind: Bin, change: int) -> None:
        """One holder more (1) or less (-1) gives a storage this kind."""
        if key in self._storages:
            self._move(key, -1)
            claims = self._claims.setdefault(key, {})
            claims[kind] = claims.get(kind, 0) + change
            self._move(key, 1)

    def forget(self, spared: Set[int] = frozenset()) -> Mapping[int, Storage]:
        """Drop what nothing holds; returns it. Those in `spared` stay for now."""
        gone = {key: self._storages[key] for key in self._loose if key not in spared}
        for key, storage in gone.items():
            self._move(key, -1)
            if key not in self._away:
                self.total -= storage.nbytes
            del self._storages[key], self._holders[key]
            self._claims.pop(key, None)
        self._loose &= spared
        return gone

    def alive(self) -> tuple[Storage, ...]:
        """All storages that were not forgotten."""
        return tuple(self._storages.values())

    def bins(self) -> dict[Bin, int]:
        """Bytes by kind."""
        totals = dict.fromkeys(Bin, 0)
        for (kind, _), nbytes in self.parts.items():
            totals[kind] += nbytes
        return totals

    def _move(self, key: int, sign: int) -> None:
        storage = self._storages[key]
        part = self._kind(key, storage), storage.stage
        self.parts[part] = self.parts.get(part, 0) + sign * storage.nbytes

    def _kind(self, key: int, storage: Storage) -> Bin:
        claims = self._claims.get(key)
        if claims is not None:
            for kind in _CLAIMS:
                if claims.get(kind):
                    return kind
        return Bin.LIVE_SEGMENT if storage.born in FOR_REPLAY else Bin.REST


class Table(MutableMapping[K, V]):
    """A table whose entries hold storages.

    Args:
        ledger: Told of what entries hold.
        holds: What an entry holds.
    """

    def __init__(self, ledger: Ledger, holds: Callable[[K, V], Holds]) -> None:
        self._ledger = ledger
        self._holds = holds
        self._entries: dict[K, V] = {}

    def __getitem__(self, key: K) -> V:
        return self._entries[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._ledger.hold(self._holds(key, value))
        if key in self._entries:
            self._ledger.release(self._holds(key, self._entries[key]))
        self._entries[key] = value

    def __delitem__(self, key: K) -> None:
        self._ledger.release(self._holds(key, self._entries.pop(key)))

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
