"""Small pipelines, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from overlap.chunk import ModelChunk
from overlap.dispatch import LocalTransport, Transport
from overlap.engine import Engine, Feeds
from overlap.lanes import Lanes, NullLanes
from overlap.model import Decoder, ModelConfig
from overlap.model.cut import Border, Cut
from overlap.pipelining import Pipeline, ScheduleKind, make_layout, placement_of
from overlap.pipelining.schedules import SPLITS
from overlap.pipelining.verify import held_gradient
from overlap.verify import Prepare, as_is, compare
from recompute.config import Granularity, Keep, Method, RecomputeConfig, Replay

LOCAL = LocalTransport()
SMALL = {
    "hidden": 8, "heads": 1, "kv_rank": 4, "nope_dim": 4, "rope_dim": 4, "value_dim": 4, "ffn_width": 12,
    "experts": 2, "topk": 1, "expert_width": 8, "shared_width": 0, "vocab": 13, "max_seq": 6, "dropout": 0.1,
}  # fmt: skip


def small(**fields: Any) -> ModelConfig:
    """A tiny decoder."""
    return ModelConfig(**{**SMALL, **fields})


def uniform(
    num_layers: int = 1,
    replay: Replay = Replay.JUST_IN_TIME,
    method: Method = Method.UNIFORM,
    keep: Keep = Keep.DEVICE,
) -> Any:
    """A rule."""
    return RecomputeConfig(granularity=Granularity.FULL, method=method, num_layers=num_layers, replay=replay, keep=keep)


def settings(kind: ScheduleKind, recompute: RecomputeConfig, **more: Any) -> dict[str, Any]:
    """What the chunks of a pipeline and of its reference share."""
    return {"recompute": recompute, "delay_wgrad": kind in SPLITS, "seed": 3, **more}


def make_pipeline(
    kind: ScheduleKind,
    config: ModelConfig,
    recompute: RecomputeConfig,
    *,
    vpp: int = 2,
    per_stage: Sequence[int] | None = None,
    pin: bool = False,
    lanes: Lanes = NullLanes(),  # noqa: B008 (stateless)
    transport: Transport = LOCAL,
    group: dist.ProcessGroup | None = None,
    prepare: Prepare = as_is,
    **more: Any,
) -> Pipeline:
    """One rank's share, over a process group, or the default one."""
    layout = make_layout(
        pp=dist.get_world_size(group), vpp=vpp, layers=config.layers, per_stage=per_stage, placement=placement_of(kind)
    )
    common = settings(kind, recompute, **more)

    def make(cut: Cut, border: Border) -> ModelChunk:
        module = Decoder(config, transport=transport, cut=cut, border=border)
        return prepare(ModelChunk(module, lanes=lanes, **common))

    return Pipeline(
        layout, kind, make, group=group, lanes=lanes, dtype=torch.float32, device=torch.device("cpu"),
        pin_activations=pin,
    )  # fmt: skip


def make_reference(
    kind: ScheduleKind,
    config: ModelConfig,
    recompute: RecomputeConfig,
    *,
    stages: int = 2,
    transport: Transport = LOCAL,
    prepare: Prepare = as_is,
    **more: Any,
) -> ModelChunk:
    """The whole model."""
    module = Decoder(config, transport=transport, split_embedding=stages > 1)
    return prepare(ModelChunk(module, **settings(kind, recompute, **more)))


def batch(config: ModelConfig, microbatches: int, seed: int = 0) -> list[Feeds]:
    """Random microbatches of two rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(config.vocab, (2, 7), generator=generator) for _ in range(microbatches)]
    return [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def different(pipeline: Pipeline, reference: ModelChunk, found: Any, expected: Any) -> list[str]:
    """Names of gradients, buffers and losses of this rank that are not the reference's, bit for bit."""
    wanted = dict(reference.module.named_parameters())
    own = pipeline.named_parameters()
    gradients = compare(*({n: held_gradient(reference, held[n]) for n in own} for held in (wanted, own)))
    kept = dict(reference.module.named_buffers(remove_duplicate=False))
    held = dict(pipeline.named_buffers())
    buffers = compare({n: kept[n] for n in held}, held)
    losses = [compare({n: theirs[n] for n in ours}, ours) for theirs, ours in zip(expected, found, strict=True)]
    return [*gradients.different, *buffers.different, *(name for item in losses for name in item.different)]


class LostGradient(Engine):
    """A control: the gradient that a stage returns is halved."""

    def _by_adjoint(self, issue: Any, owner: Any, gradients: Any) -> Any:
        if issue.stage.name == "recv":
            gradients = [None if gradient is None else gradient * 0.5 for gradient in gradients]
        return super()._by_adjoint(issue, owner, gradients)
