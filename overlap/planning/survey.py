"""Survey: the dry runs of a job: each distinct model chunk once, on fake tensors; and what its weights take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from overlap.chunk import ModelChunk
from overlap.ir import Program, StageKey
from overlap.memory.device_model import DeviceModel
from overlap.memory.facts import Footprint
from overlap.memory.fake import fake_chunk
from overlap.memory.footprint import take_footprint
from overlap.model.experts import GroupedExperts
from overlap.planning.bins import RankBin
from overlap.planning.chunk_model import ChunkModel, feeds_of
from overlap.planning.chunks import ChunkShape, chunk_shapes
from overlap.planning.device_kernels import INSIDE, DeviceKernels, register_flops
from overlap.planning.job import Job, Optimizer
from recompute.config import RecomputeConfig

CUDA_BLOCK = 512
"""Bytes that the caching allocator rounds a request up to. Beyond 1 MiB it may hand out up to 1 MiB more than asked,
where a cached block's rest is not worth splitting off; that is not modelled."""
_STATE = 8
"""Bytes per parameter of AdamW's two float32 moments."""
_MASTER = 4
"""Bytes per parameter of the float32 master weight that a narrower parameter needs."""
_WIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedChunk:
    """One distinct chunk."""

    program: Program
    footprint: Footprint
    fixed: Mapping[RankBin, int]
    """Bytes of its weights, gradients and optimizer state."""


Survey = Mapping[ChunkShape, SurveyedChunk]


def survey(job: Job, device: DeviceModel, rules: Sequence[RecomputeConfig]) -> Survey:
    """Dry-run every distinct chunk of a job, with and without delayed weight gradients.

    Args:
        job: The job.
        device: Turns work into time.
        rules: The survey serves these, and all that rebuild no part of a stage.

    Raises:
        ConfigError: The model cannot be surveyed.
    """
    register_flops()
    shapes = tuple(dict.fromkeys(chunk_shapes(job)))
    few = {shape: covering(shape, shapes) for shape in shapes}
    footprints = {shape: _footprint(job, shape, device, rules) for shape in dict.fromkeys(few.values())}
    return {shape: _chunk(job, shape, few[shape], footprints[few[shape]]) for shape in shapes}


def _footprint(job: Job, few: ChunkShape, device: DeviceModel, rules: Sequence[RecomputeConfig]) -> Footprint:
    with fake_chunk(lambda: ModelChunk(ChunkModel(job, few))) as chunk, DeviceKernels():
        feeds = feeds_of(job, few)
        return take_footprint(chunk, feeds, rules=rules, device=device, granule=CUDA_BLOCK, inside=INSIDE)


def _chunk(job: Job, shape: ChunkShape, few: ChunkShape, footprint: Footprint) -> SurveyedChunk:
    with fake_chunk(lambda: ModelChunk(ChunkModel(job, shape))) as chunk:
        every = spread(footprint, chunk.program, partial(stand_in, shape, few))
        return SurveyedChunk(program=chunk.program, footprint=every, fixed=_fixed(job, chunk.module))


def covering(shape: ChunkShape, shapes: Sequence[ChunkShape]) -> ChunkShape:
    """The distinct layers of a chunk, or those of another one of the job that has more of the same kinds."""
    few = distinct_layers(shape)
    alike = (
        other
        for other in map(distinct_layers, shapes)
        if (other.first, other.last, bool(other.dense), bool(other.moe))
        == (few.first, few.last, bool(few.dense), bool(few.moe))
    )
    return max(alike, key=lambda other: other.layers)


def distinct_layers(shape: ChunkShape) -> ChunkShape:
    """The chunk with one layer of each kind, and its last one beside them: that layer's readers are others."""
    if shape.moe:
        return replace(shape, dense=min(shape.dense, 1), moe=min(shape.moe, 2))
    return replace(shape, dense=min(shape.dense, 2))


def stand_in(shape: ChunkShape, few: ChunkShape, layer: int) -> int:
    """The layer of `few` that behaves as a layer of the whole chunk."""
    if layer >= shape.layers - 1:
        return layer - shape.layers + few.layers
    return 0 if layer < shape.dense else few.dense


def spread(footprint: Footprint, program: Program, layer_of: Callable[[int], int]) -> Footprint:
    """The footprint of a whole program from that of some of its layers."""
    keys: dict[StageKey, list[StageKey]] = {}
    for stage in program.stages:
        source = None if stage.layer is None else layer_of(stage.layer)
        keys.setdefault((source, stage.name), []).append(stage.key)
    facts = {
        delayed: {replace(kind, key=key): fact for kind, fact in found.items() for key in keys.get(kind.key, ())}
        for delayed, found in footprint.facts.items()
    }
    snapshots = {key: sizes for source, sizes in footprint.snapshots.items() for key in keys.get(source, ())}
    spans = {key: found for source, found in footprint.spans.items() for key in keys.get(source, ())}
    return replace(footprint, facts=facts, snapshots=snapshots, spans=spans)


def _fixed(job: Job, module: nn.Module) -> dict[RankBin, int]:
    """Bytes that stay: a rank's own experts are shared by dp/ep ranks, all else by dp."""
    experts = {id(p) for m in module.modules() if isinstance(m, GroupedExperts) for p in m.parameters(recurse=False)}
    bins = dict.fromkeys(RankBin, 0)
    for parameter in module.parameters():
        nbytes = _rounded(parameter.numel() * parameter.element_size())
        bins[RankBin.WEIGHTS] += nbytes
        bins[RankBin.GRADIENTS] += nbytes
        share = job.dp // job.ep if id(parameter) in experts else job.dp
        state = parameter.numel() * (_STATE + (_MASTER if parameter.element_size() < _WIDE else 0))
        bins[RankBin.OPTIMIZER] += _rounded(-(-state // (share if job.optimizer is Optimizer.DISTRIBUTED else 1)))
    return bins


def _rounded(nbytes: int) -> int:
    return -(-nbytes // CUDA_BLOCK) * CUDA_BLOCK
