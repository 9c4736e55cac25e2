"""Small decoders and their data, for tests that run on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from overlap.chunk import ModelChunk
from overlap.dispatch.all_to_all import AllToAll
from overlap.engine import Feeds
from overlap.ir import Op
from overlap.lower import Issue
from overlap.model import Decoder
from overlap.model.config import ModelConfig
from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.shards import local
from overlap.parallel.work_lanes import WorkLanes
from overlap.parallel.works import Works
from overlap.parallel.world import SOLO, World, open_world
from overlap.verify import Verdict, verify

VOCAB, SEQ = 32, 8
GIVES_GRADIENTS = (Op.BACKWARD, Op.WGRAD)


def world_of(*, ep: int = 1, seconds: float = 30.0) -> World:
    """The ranks of the test."""
    layout = ParallelLayout(world_size=dist.get_world_size(), ep=ep)
    return open_world(layout, timeout=timedelta(seconds=seconds))


def small_chunk(model: Mapping[str, Any] | None = None, world: World = SOLO, **settings: Any) -> ModelChunk:
    """The same on every rank, except for the experts that expert parallelism splits."""
    shape = {"layers": 3, "dense_layers": 1, "hidden": 16, "ffn_width": 24, "expert_width": 12, "shared_width": 12}
    config = ModelConfig(**{**shape, "vocab": VOCAB, "max_seq": SEQ, **(model or {})})
    if world.layout.ep == 1:
        return ModelChunk(Decoder(config, seed=3), world=world, **settings)
    works = Works()
    module = Decoder(config, transport=AllToAll(world.ep_group, works, world.collectives), seed=3)
    return ModelChunk(module, lanes=WorkLanes(works), world=world, **settings)


def feeds_of(rank: int, microbatches: int, step: int = 0) -> list[Feeds]:
    """A rank's microbatches; other ranks have others."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(VOCAB, (1, SEQ + 1), generator=generator) for _ in range(microbatches)]
    return [{"ids": t[:, :-1].contiguous(), "labels": t[:, 1:].contiguous()} for t in tokens]


def parallel_chunk(world: World, data: DataSettings, model: Mapping[str, Any] | None = None, **kw: Any) -> ModelChunk:
    """A small chunk on several ranks."""
    return make_parallel(small_chunk(model, world, **kw), data)


def verify_parallel(world: World, data: DataSettings, chunk: ModelChunk, microbatches: int = 3, **kw: Any) -> Verdict:
    """Two steps against plain autograd on the same ranks."""
    batches = [feeds_of(world.rank, microbatches, step) for step in range(2)]
    return verify(chunk, batches, prepare=partial(make_parallel, settings=data), **kw)


def whole(tensors: Mapping[str, Tensor | None], world: World) -> dict[str, Tensor | None]:
    """All of each tensor, copies; the parts come in one exchange per group of ranks.

    Not by full_tensor(): DTensor remembers meshes that equal each other, and in a worker that serves several tests
    it may find one whose process groups are gone.
    """
    shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    dense = {name for name, tensor in shards.items() if tensor.device_mesh.mesh_dim_names == ("data",)}
    joined: dict[str, Tensor] = {}
    # a process alone has neither shards nor groups
    for names in filter(None, (dense, shards.keys() - dense)):
        group = world.data_group if names is dense else world.expert_data_group
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, {name: local(shards[name]).detach() for name in names}, group=group)
        for name in names:
            (placement,) = shards[name].placements
            assert isinstance(placement, Shard)
            joined[name] = torch.cat([part[name] for part in parts], placement.dim)
    return {
        name: joined[name] if name in joined else None if tensor is None else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def gradients(chunk: ModelChunk) -> dict[str, Tensor | None]:
    """Whole gradients by name."""
    return whole({name: parameter.grad for name, parameter in chunk.module.named_parameters()}, chunk.world)


def experts_of_all(chunk: ModelChunk, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors, those of split experts put together from all ranks of the expert group."""
    world = chunk.world
    found = {}
    for name, tensor in tensors.items():
        assert tensor is not None
        found[name] = tensor
        if ".experts." in name and tensor.dim() and world.layout.ep > 1:
            parts = [torch.empty_like(tensor) for _ in range(world.layout.ep)]
            dist.all_gather(parts, tensor.contiguous(), group=world.ep_group)
            found[name] = torch.cat(parts)
    return found


class Order:
    """Observes which slots end, in order, with marks that the test puts between them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def before(self, issue: Issue, owner: Any) -> None:
        """Nothing to note."""

    def after(self, issue: Issue, owner: Any) -> None:
        """Note the slot by its microbatch in the step."""
        self.log.append(f"{issue.slot.op}{owner.number} {issue.stage.label}")
