"""The orientation formula: what textbook recompute would hold, from two numbers of the model.

(ceil(L/k) + N - 1) * I + k * A bytes, with L layers in segments of k, N microbatches in flight (at most two here: one
runs forward while the one before runs backward), I bytes of one segment's inputs and A bytes of one layer's graph. It
knows nothing of gradients, losses, routing, the order of slots or a lead; the prediction does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap.chunk import ModelChunk
from overlap.ir import Program, StageKey
from overlap.memory.bins import Bin, Peaks
from overlap.memory.facts import Facts, Footprint, Kind
from overlap.memory.gap import check_step
from overlap.memory.refs import Source
from recompute.checks import check_kind
from recompute.segments import Segments

_IN_FLIGHT = 2


def formula(chunk: ModelChunk, footprint: Footprint, num_microbatches: int) -> Peaks:
    """Evaluate the formula for a step; with several recompute configs, for the one that needs most.

    Layers that are not recomputed (E of them: all under `none`, the tail under `block`) count as (E + N - 1) * A in
    `rest`. The kinds that the formula does not know are 0.

    Args:
        chunk: Gives the configs.
        footprint: Gives I and A: the largest of any segment, and of any layer.
        num_microbatches: Of the step.

    Raises:
        ConfigError: An argument is not what it should be.
    """
    check_step(chunk, num_microbatches)
    check_kind("footprint", footprint, Footprint, "a Footprint, as take_footprint gives it")
    trained = chunk.program.trained()
    facts = footprint.facts[chunk.delay_wgrad]
    graph = max((graph_bytes(chunk.program, facts, layer) for layer in chunk.program.layers), default=0)
    extra = min(_IN_FLIGHT, num_microbatches) - 1
    estimates = [
        _estimate(chunk, footprint, chunk.planner.side(config, trained).segments, graph, extra)
        for config in chunk.configs(num_microbatches)
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _estimate(chunk: ModelChunk, footprint: Footprint, segments: Segments, graph: int, extra: int) -> Peaks:
    """One config: `graph` is A, `extra` is N - 1."""
    program, facts = chunk.program, footprint.facts[chunk.delay_wgrad]
    inputs = max((input_bytes(program, footprint, facts, segment.layers) for segment in segments), default=0)
    eager = len(program.layers) - sum(map(len, segments))
    bins = dict.fromkeys(Bin, 0)
    if segments:
        bins[Bin.SEGMENT_INPUTS] = (len(segments) + extra) * inputs
        bins[Bin.LIVE_SEGMENT] = max(map(len, segments)) * graph
    if eager:
        bins[Bin.REST] = (eager + extra) * graph
    return Peaks(bins=bins, total=sum(bins.values()))


def graph_bytes(program: Program, facts: Mapping[Kind, Facts], layer: int) -> int:
    """A: bytes that the graphs of one layer hold, beside its inputs."""
    graphs = [Kind(stage.key, Source.FORWARD, True, False) for stage in program.layer_stages[layer]]
    return sum(
        facts[kind].born[ref.place]
        for kind in graphs
        if kind in facts
        for ref in facts[kind].tape
        if ref.source is Source.FORWARD
    )


def input_bytes(program: Program, footprint: Footprint, facts: Mapping[Kind, Facts], layers: Sequence[int]) -> int:
    """I: bytes of the values that enter a segment, storages that they share counted once."""
    births = {birth: nbytes for value in program.live_ins(layers) for birth, nbytes in _births(program, facts, value)}
    # The step copies a feed that a replay reads; one with a gradient stays the caller's.
    fed = [footprint.feeds[v] for v in program.live_ins(layers) if v not in program.producers and program.nondiff(v)]
    return sum(births.values()) + sum(map(sum, fed))


_Birth = tuple[StageKey, int]
_OUTSIDE: tuple[_Birth, int] = (((None, ""), 0), 0)


def _births(program: Program, facts: Mapping[Kind, Facts], value: str) -> list[tuple[_Birth, int]]:
    """Where each tensor of a value was born, (stage, number among its births), and how many bytes that took."""
    if value not in program.producers:
        return []
    stage = program.producers[value]
    made = facts[Kind(stage.key, Source.FORWARD, False, False)]
    found: list[tuple[_Birth, int]] = []
    for ref in made.writes[stage.writes.index(value)]:
        if ref.source is Source.FORWARD:
            found.append(((stage.key, ref.place), made.born[ref.place]))
        elif ref.source is Source.READ and stage.reads[ref.place] in program.producers:
            found.append(_births(program, facts, stage.reads[ref.place])[ref.part])
        else:
            found.append(_OUTSIDE)
    return found
