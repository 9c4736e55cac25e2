"""Make a chunk data-parallel: replicate it over the ranks of a world, or shard it.

How a gradient is averaged: each rank's losses carry the chunk's loss scale, a mean over the rank's own microbatches.
The mean over the data ranks divides by their number, for dense parameters and for experts alike: an expert's gradient
already holds the tokens of every rank that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from overlap.chunk import ModelChunk
from overlap.ir import Lane, Program
from overlap.model.experts import GroupedExperts
from overlap.model.layers import DenseLayer, MoELayer
from overlap.model.mtp import MTPDepth
from overlap.parallel.buckets import BUCKET_BYTES, Reduction
from overlap.parallel.experts import expert_parameters
from overlap.parallel.fsdp import start
from overlap.parallel.replicas import ReductionOf, Replicas
from overlap.parallel.sharded import Sharded
from overlap.parallel.world import World
from recompute.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """How replicas are kept in step."""

    fsdp: bool = False
    """Shard parameters, gradients and optimizer state; else every rank holds them all."""
    keep_together: bool = False
    """With `fsdp`: parameters stay together from the begin of a step to its end: more memory, each brought once."""
    reduce_dtype: torch.dtype | None = None
    """Type of gradient sums over ranks, and with `fsdp` over microbatches; None: the parameter's own."""
    bucket_bytes: int = BUCKET_BYTES
    """Without `fsdp`: bytes of gradients that are reduced together."""


def make_parallel(chunk: ModelChunk, settings: DataSettings = DataSettings()) -> ModelChunk:
    """Have a chunk keep in step with its replicas. Collective; once per chunk, before its optimizer is made.

    Args:
        chunk: The same on all data ranks of its world, except for the experts; changed in place.
        settings: How.

    Returns:
        The chunk.

    Raises:
        ConfigError: Experts that do not divide over the ranks that hold them; with `fsdp`, a stage with parameters on
            another lane than the compute lane.
    """
    world = chunk.world
    if world.groups is None or world.layout.data == 1:
        if settings.fsdp:
            raise ConfigError(field="fsdp", value=True, rule="needs several data ranks to shard over")
        return chunk
    if not settings.fsdp:
        reductions = partial(_reductions, world, chunk.module, settings)
        chunk.rebind(Replicas(reductions, world.collectives, bucket_bytes=settings.bucket_bytes))
        return chunk
    _check_lanes(chunk.program)
    chunk.rebind(_shard(chunk.module, world, settings))
    return chunk


def _check_lanes(program: Program) -> None:
    """Sharded parameters are there in the order of the compute lane (fsdp.py's NOTE)."""
    for stage in program.stages:
        if stage.parameters and stage.lane is not Lane.COMPUTE:
            rule = f"stage {stage.label} reads parameters on lane {stage.lane.value}: only the compute lane may"
            raise ConfigError(field="fsdp", value=True, rule=rule)


def _reductions(world: World, module: nn.Module, settings: DataSettings) -> ReductionOf:
    return partial(_reduction, world, expert_parameters(module), settings)


def _reduction(world: World, experts: frozenset[int], settings: DataSettings, parameter: nn.Parameter) -> Reduction:
    groups = world.formed
    group: dist.ProcessGroup | None = groups.expert_data if id(parameter) in experts else groups.data
    if id(parameter) in experts and world.layout.expert_data == 1:
        group = None
    return Reduction(group=group, divide=world.layout.data, dtype=settings.reduce_dtype)


def _shard(module: nn.Module, world: World, settings: DataSettings) -> Sharded:
    """Shard experts over the ranks that hold them, then layers, then what is left."""
    policy = MixedPrecisionPolicy(reduce_dtype=settings.reduce_dtype)
    alone = _alone(world, module)
    for part in _parts(module):
        mesh, placement = world.formed.data_mesh, None
        if isinstance(part, GroupedExperts):
            if alone:
                continue
            if world.layout.ep > 1:
                mesh, placement = world.mesh["expert_data"], partial(_by_rows, world.layout.expert_data)
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, ignored_params=alone)
        # gloo has no reduction that divides; adding up and dividing once is one rule for all backends
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(float(world.layout.data))
    rest = Replicas(partial(_reductions_alone, world, module, settings), world.collectives)
    root = cast("FSDPModule", module)
    return Sharded(root, start(root, world.collectives), rest, keep_together=settings.keep_together)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """What becomes a group of parameters, inner parts first."""
    depths = [part for part in module.modules() if isinstance(part, MTPDepth)]
    inside = {id(layer) for depth in depths for layer in depth.modules()}
    yield from (part for part in module.modules() if isinstance(part, GroupedExperts))
    layers = (part for part in module.modules() if isinstance(part, DenseLayer | MoELayer))
    yield from (layer for layer in layers if id(layer) not in inside)
    yield from depths
    yield module


def _by_rows(ranks: int, parameter: nn.Parameter) -> Shard:
    """Experts are split by expert already: shard each one's rows, so that a checkpoint can say which part is where.

    Raises:
        ConfigError: The rows do not divide.
    """
    if parameter.shape[1] % ranks:
        rule = f"must divide over the {ranks} ranks that hold the same experts"
        raise ConfigError(field="rows of an expert matrix", value=parameter.shape[1], rule=rule)
    return Shard(1)


def _alone(world: World, module: nn.Module) -> set[nn.Parameter]:
    """The experts, if no other rank holds the same ones: there is nobody to shard them over."""
    experts = expert_parameters(module) if world.layout.expert_data == 1 else frozenset()
    return {p for p in module.parameters() if id(p) in experts}


def _reductions_alone(world: World, module: nn.Module, settings: DataSettings) -> ReductionOf:
    reduction = Reduction(group=None, divide=world.layout.data, dtype=settings.reduce_dtype)
    return partial(_if_among, frozenset(map(id, _alone(world, module))), reduction)


def _if_among(parameters: frozenset[int], reduction: Reduction, parameter: nn.Parameter) -> Reduction | None:
    return reduction if id(parameter) in parameters else None
