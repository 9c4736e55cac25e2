"""Kinds of memory and their sums: the vocabulary that measurement and prediction share. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from overlap.ir import Op


class Bin(StrEnum):
    """What a live storage is there for. A storage belongs to the first kind that applies."""

    SEGMENT_INPUTS = "segment_inputs"
    """Holds a value that the replay of a segment will read, written by the first pass (R2)."""
    PINNED_ROUTING = "pinned_routing"
    """Holds a value that the first pass pinned for the replay or for an adjoint (R7)."""
    PENDING_WGRAD = "pending_wgrad"
    """Held by a weight gradient that waits for its W slot (R13)."""
    LIVE_SEGMENT = "live_segment"
    """Born in a replay, or brought back for one: values and graphs of the segment whose backward is next."""
    HOST_INPUTS = "host_inputs"
    """Holds a segment input in host memory until its replay (keep="host"). No part of totals: they are the device's."""
    RNG_STATES = "rng_states"
    """Generator states kept for a replay; always 0, since draws come from derived seeds (R4)."""
    REST = "rest"
    """Graphs of layers that are not recomputed, temporaries of the first pass, gradients, losses, snapshots."""


FOR_REPLAY = (Op.REPLAY, Op.LOAD)
"""Operations whose storages a live segment holds."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation."""

    nbytes: int
    born: Op
    """Operation of the slot that allocated it; `Op.CALL` outside any slot."""
    stage: str = ""
    """Name of that slot's stage, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """Live bytes at the end of one slot, before its frees."""

    slot: str
    """The slot, with the microbatch's number within the step."""
    bytes: Mapping[Bin, int]

    @property
    def total(self) -> int:
        """Live bytes of all kinds on the device."""
        return sum(self.bytes.values()) - self.bytes[Bin.HOST_INPUTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Highest live bytes of a step."""

    bins: Mapping[Bin, int]
    """Of each kind; the kinds may peak at different slots."""
    total: int
    """Of all kinds together; at most the sum of `bins`."""

    def as_json(self) -> dict[str, int]:
        """`bins` by name, and `total`."""
        return {**{kind.value: self.bins[kind] for kind in Bin}, "total": self.total}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Live bytes over one training step. Feeds, parameters, buffers and `.grad` are not counted."""

    curve: tuple[Border, ...]
    """Every slot border, in issue order."""

    @property
    def peaks(self) -> Peaks:
        """The highest border of each kind, and of the total."""
        return Peaks(
            bins={kind: max((border.bytes[kind] for border in self.curve), default=0) for kind in Bin},
            total=max((border.total for border in self.curve), default=0),
        )

    @property
    def total(self) -> int:
        """Highest live bytes of all kinds together."""
        return self.peaks.total

    def as_json(self) -> dict[str, int]:
        """`peaks` by name, and `total`."""
        return self.peaks.as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Highest:
    """The highest live sum while one slot runs, its own temporaries included."""

    slot: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Ids of the storages that a microbatch holds for a named purpose."""

    segment_inputs: Collection[int]
    pinned: Collection[int]
    pending: Collection[int]
    host: Collection[int] = ()


def kinds_of(live: Mapping[int, Storage], claims: Iterable[Claims]) -> dict[int, Bin]:
    """The kind of each storage.

    Args:
        live: Every live storage, by id.
        claims: What the microbatches hold; ids that are not live (feeds, parameters) do not count.
    """
    held = list(claims)
    groups: Sequence[tuple[Bin, Iterable[Collection[int]]]] = (
        (Bin.REST, (live,)),
        (Bin.LIVE_SEGMENT, ({key for key, storage in live.items() if storage.born in FOR_REPLAY},)),
        (Bin.PENDING_WGRAD, (claim.pending for claim in held)),
        (Bin.PINNED_ROUTING, (claim.pinned for claim in held)),
        (Bin.SEGMENT_INPUTS, (claim.segment_inputs for claim in held)),
        (Bin.HOST_INPUTS, (claim.host for claim in held)),
    )
    # Written weakest first, so that the strongest claim stays.
    return {key: kind for kind, sets in groups for keys in sets for key in keys}


def sum_bins(live: Mapping[int, Storage], claims: Iterable[Claims]) -> dict[Bin, int]:
    """Bytes of each kind; arguments as `kinds_of` takes them."""
    kinds = kinds_of(live, claims)
    totals = dict.fromkeys(Bin, 0)
    for key, storage in live.items():
        totals[kinds[key]] += storage.nbytes
    return totals
