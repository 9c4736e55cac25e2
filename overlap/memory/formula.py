"""The orientation formula: what textbook recompute would hold, from two numbers of the model.

(ceil(L/k) + N - 1) * I + k * A bytes, with L layers in segments of k, N microbatches in flight (at most two here: one
runs forward while the one before runs backward), I bytes of one segment's inputs and A bytes of one layer's graph. It
knows nothing of gradients, losses, routing or the order of slots; the prediction does.
"""

from __future__ import annotations

from overlap.chunk import ModelChunk
from overlap.ir import Program, Stage, StageKey
from overlap.memory.bins import Bin, Peaks
from overlap.memory.facts import Facts, Footprint, Kind, Source
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
    """
    trained = chunk.program.trained()
    estimates = [
        _estimate(chunk.program, chunk.planner.side(config, trained).segments, footprint, num_microbatches)
        for config in chunk.configs(num_microbatches)
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _estimate(program: Program, segments: Segments, footprint: Footprint, num_microbatches: int) -> Peaks:
    extra = min(_IN_FLIGHT, num_microbatches) - 1
    graph = max((graph_bytes(program, footprint, layer) for layer in program.layers), default=0)
    inputs = max((input_bytes(program, footprint, segment.layers) for segment in segments), default=0)
    eager = len(program.layers) - sum(len(segment) for segment in segments)
    bins = dict.fromkeys(Bin, 0)
    if segments:
        bins[Bin.SEGMENT_INPUTS] = (len(segments) + extra) * inputs
        bins[Bin.LIVE_SEGMENT] = max(map(len, segments)) * graph
    if eager:
        bins[Bin.REST] = (eager + extra) * graph
    return Peaks(bins=bins, total=sum(bins.values()))


def graph_bytes(program: Program, footprint: Footprint, layer: int) -> int:
    """A: bytes that the graphs of one layer hold, beside its inputs."""
    return sum(_graph_bytes(stage, footprint) for stage in program.layer_stages[layer])


def _graph_bytes(stage: Stage, footprint: Footprint) -> int:
    facts = footprint.facts.get(Kind(stage.key, Source.FORWARD, True, False))
    if facts is None:
        return 0
    return sum(facts.born[ref.place] for ref in facts.tape if ref.source is Source.FORWARD)


def input_bytes(program: Program, footprint: Footprint, layers: tuple[int, ...]) -> int:
    """I: bytes of the values that enter a segment, feeds left out, shared storages counted once."""
    storages = {
        storage
        for value in program.live_ins(layers)
        for storage in _storages(program, footprint, value)
        if storage != _FED
    }
    return sum(_forward(footprint, key).born[place] for key, place in storages)


_Birth = tuple[StageKey, int]
_FED: _Birth = ((None, ""), -1)


def _storages(program: Program, footprint: Footprint, value: str) -> list[_Birth]:
    """Where each tensor of a value was born: (stage, number of the storage among those born there)."""
    if value not in program.producers:
        return [_FED] * footprint.feeds[value]
    stage = program.producers[value]
    found: list[_Birth] = []
    for ref in _forward(footprint, stage.key).writes[stage.writes.index(value)]:
        if ref.source is Source.FORWARD:
            found.append((stage.key, ref.place))
        elif ref.source is Source.READ:
            found.append(_storages(program, footprint, stage.reads[ref.place])[ref.part])
        else:
            found.append(_FED)
    return found


def _forward(footprint: Footprint, key: StageKey) -> Facts:
    return footprint.facts[Kind(key, Source.FORWARD, False, False)]
