"""Small chunks over ranks, for tests that look inside a step. Functions here run on every rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from overlap import ModelChunk, get_order
from overlap.dispatch import LocalTransport
from overlap.dispatch.all_to_all import AllToAll
from overlap.model import Decoder, ModelConfig
from overlap.parallel.collective_log import Collectives
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.work_lanes import WorkLanes
from overlap.parallel.works import Works
from overlap.parallel.world import SOLO, World, open_world
from recompute import RecomputeConfig, Replay

TINY: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "expert_width": 8, "shared_width": 8, "vocab": 32}
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)


def join(ep: int, size: int, debug: bool = False) -> World:
    """Form the groups; every rank of the pool's run calls it."""
    return open_world(ParallelLayout(world_size=size, ep=ep), "cpu", timedelta(seconds=30), debug=debug)


def chunk_in(world: World, rule: RecomputeConfig = HIDDEN, log: Collectives | None = None, **shape: Any) -> ModelChunk:
    """A chunk over the ranks of a world, with a log of its own if one is given; in SOLO it holds all experts."""
    works = Works()
    alone = world is SOLO
    transport = LocalTransport() if alone else AllToAll(world.ep_group, works, log or world.collectives)
    return ModelChunk(
        Decoder(ModelConfig(**{**TINY, **shape}), transport=transport, seed=4),
        recompute=rule,
        order=get_order("multi_queue", rule.replay),
        lanes=WorkLanes(works),
        world=world,
    )


def feeds_of(rank: int, count: int, length: int = 8) -> list[dict[str, Tensor]]:
    """The microbatches that a rank draws."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(TINY["vocab"], (count, 1, length + 1), generator=generator)
    return [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens]


def gradients(chunk: ModelChunk) -> dict[str, Tensor]:
    """By parameter name."""
    return {name: p.grad for name, p in chunk.module.named_parameters() if p.grad is not None}
