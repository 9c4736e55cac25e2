"""RankBin: what a rank's memory is there for, weights and optimizer included. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from overlap.memory.bins import Bin
from overlap.memory.ledger import Part


class RankBin(StrEnum):
    """A storage belongs to the first kind that applies; the bins of a peak add up to it."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """Moments, and float32 master weights of narrower ones."""
    SEGMENT_INPUTS = "segment_inputs"
    """What replays will read (R2)."""
    PINNED_ROUTING = "pinned_routing"
    """What the first pass pinned (R7)."""
    PENDING_WGRAD = "pending_wgrad"
    """What delayed weight gradients wait with (R13)."""
    LIVE_SEGMENT = "live_segment"
    """Born in a replay, or brought back for one."""
    TRANSPORT = "transport"
    """Rows received in the first pass or in backward."""
    PIPELINE = "pipeline"
    """Received from, or kept for, other pipeline ranks."""
    HEAD_LOSS = "head_loss"
    """Born in the head."""
    ACTIVATIONS = "activations"
    """Graphs of layers that are not recomputed, first passes under way, gradients."""
    TEMPORARIES = "temporaries"
    """What the slot of the peak holds within itself."""
    WORKSPACE = "workspace"
    """Of the matrix library."""


Bytes = Mapping[RankBin, int]

_CLAIMED = {
    Bin.SEGMENT_INPUTS: RankBin.SEGMENT_INPUTS,
    Bin.PINNED_ROUTING: RankBin.PINNED_ROUTING,
    Bin.PENDING_WGRAD: RankBin.PENDING_WGRAD,
    Bin.LIVE_SEGMENT: RankBin.LIVE_SEGMENT,
    Bin.RNG_STATES: RankBin.ACTIVATIONS,
}
_BY_STAGE = {
    "dispatch": RankBin.TRANSPORT,
    "combine": RankBin.TRANSPORT,
    "receive": RankBin.PIPELINE,
    "send": RankBin.PIPELINE,
    "head": RankBin.HEAD_LOSS,
}


def rank_bins(parts: Mapping[Part, int]) -> dict[RankBin, int]:
    """Bytes of each kind on the device, from those by kind and stage of birth."""
    totals = dict.fromkeys(RankBin, 0)
    for (kind, stage), nbytes in parts.items():
        if kind is not Bin.HOST_INPUTS:
            rest = _BY_STAGE.get(stage, RankBin.ACTIVATIONS)
            totals[_CLAIMED.get(kind, rest)] += nbytes
    return totals


def add(*parts: Bytes) -> dict[RankBin, int]:
    """Sum of bins."""
    return {kind: sum(part.get(kind, 0) for part in parts) for kind in RankBin}


def scaled(part: Bytes, factor: int) -> dict[RankBin, int]:
    """The bins of so many of the same."""
    return {kind: nbytes * factor for kind, nbytes in part.items()}


def total(part: Bytes) -> int:
    """Bytes of all kinds."""
    return sum(part.values())
