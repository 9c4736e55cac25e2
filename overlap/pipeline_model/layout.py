"""Layers of a model over the virtual stages of a pipeline, and what each stage holds of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlap.synthetic import System
from recompute.errors import ConfigError


def even_layout(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, as even as it goes; the first ones take what is left over.

    Raises:
        ConfigError: A stage would have none.
    """
    if layers < stages:
        raise ConfigError(field="layers", value=layers, rule=f"must be at least one per virtual stage: {stages}")
    return tuple(layers // stages + int(stage < layers % stages) for stage in range(stages))


def cut(system: System, layout: Sequence[int]) -> tuple[System, ...]:
    """The chunk of each virtual stage, of which some may be empty; equal chunks are one and the same object.

    The recompute rule applies to each chunk by itself (R1).

    Raises:
        ConfigError: The layout has another number of layers than the model.
    """
    if sum(layout) != len(system.kinds):
        rule = f"must add up to the model's layers: {len(system.kinds)}"
        raise ConfigError(field="pp_layout", value=tuple(layout), rule=rule)
    chunks: list[System] = []
    known: dict[tuple[tuple[str, ...], bool, bool], System] = {}
    begin = 0
    for stage, layers in enumerate(layout):
        kinds, first, last = system.kinds[begin : begin + layers], stage == 0, stage == len(layout) - 1
        if (kinds, first, last) not in known:
            known[kinds, first, last] = replace(system, kinds=kinds, first=first, last=last)
        chunks.append(known[kinds, first, last])
        begin += layers
    return tuple(chunks)


def is_empty(chunk: System) -> bool:
    """Whether a virtual stage only hands on what it gets."""
    return not (chunk.kinds or chunk.first or chunk.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds, in units of one layer: its input, and everything its backward needs."""

    segment_inputs: int = 0
    layer_activations: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            segment_inputs=self.segment_inputs + other.segment_inputs,
            layer_activations=self.layer_activations + other.layer_activations,
        )

    def __neg__(self) -> Held:
        return Held(segment_inputs=-self.segment_inputs, layer_activations=-self.layer_activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHolds:
    """What one microbatch of a virtual stage holds, by the work that is done. Embedding and head are not counted."""

    gap: Held
    """From forward to backward: a segment's input, or the layer's activations where it is not recomputed."""
    replayed: Held
    """More, while backward runs: the segments that are alive at once."""
    pending: Held
    """From I to W: what deferred weight gradients keep."""


def holds_of(chunk: System, *, defer_wgrad: bool) -> ChunkHolds:
    """What a chunk's recompute rule makes it hold.

    Args:
        chunk: As `cut` gives it.
        defer_wgrad: Whether weight gradients of recomputed layers are deferred past their own backward too: their
            activations then stay until W.
    """
    if is_empty(chunk):
        return ChunkHolds(gap=Held(), replayed=Held(), pending=Held())
    segments = [len(segment.layers) for segment in chunk.side.segments]
    eager = len(chunk.kinds) - sum(segments)
    # A hidden replay runs beside the backward of the segment after it: two are alive.
    alive = sorted(segments)[-2:] if chunk.side.hidden else sorted(segments)[-1:]
    return ChunkHolds(
        gap=Held(segment_inputs=len(segments), layer_activations=eager),
        replayed=Held(layer_activations=sum(alive)),
        pending=Held(layer_activations=eager + (sum(segments) if defer_wgrad else 0)),
    )
