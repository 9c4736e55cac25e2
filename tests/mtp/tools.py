"""What the tests of streams, depths and cut rows share: tiny models, their feeds, and comparison with the reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from overlap import ModelChunk
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.ir import Program
from overlap.model import Decoder, ModelConfig
from overlap.reference import border, forward_stage, reference_step, start_backward
from overlap.scale import PerMicrobatch, PerToken
from overlap.step import train_step
from overlap.training.rows import cut_rows
from overlap.verify import Verdict, compare, verify
from recompute import RecomputeConfig

U, B, NONE = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none()
BM = RecomputeConfig.block(2, recompute_mtp=True)
VOCAB, LENGTH = 32, 8


def tiny(**changes: Any) -> ModelConfig:
    """Two layers of 16."""
    shape: dict[str, Any] = {
        "layers": 2, "hidden": 16, "vocab": VOCAB, "expert_width": 8, "shared_width": 8, "ffn_width": 16, "kv_rank": 8,
        "nope_dim": 4, "rope_dim": 4, "value_dim": 4, "max_seq": 64,
    }  # fmt: skip
    if changes.get("attention") == "gqa":
        shape = {
            name: value for name, value in shape.items() if name not in {"kv_rank", "nope_dim", "rope_dim", "value_dim"}
        }
    if changes.get("mhc") is not None:
        shape["mhc_iterations"] = 5
    return ModelConfig(**{**shape, **changes})


def make(
    recompute: RecomputeConfig = NONE, *, order: str = "multi_queue", delay: bool = False, **changes: Any
) -> ModelChunk:
    """A tiny model as a chunk."""
    config = tiny(**changes)
    scale = PerToken() if config.per_token_loss else PerMicrobatch()
    return ModelChunk(Decoder(config), recompute=recompute, order=order, delay_wgrad=delay, loss_scale=scale)


def feeds_for(config: ModelConfig, count: int, *, batch: int = 2, length: int = LENGTH, seed: int = 0) -> list[Feeds]:
    """Random microbatches with all that the config asks for."""
    generator = torch.Generator().manual_seed(seed)
    microbatches: list[Feeds] = []
    for _ in range(count):
        tokens = torch.randint(config.vocab, (batch, length + 1), generator=generator)
        feeds = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        feeds = cut_rows(feeds, config, generator)
        microbatches.append({name: value for name, value in feeds.items() if config.labels or name != "labels"})
    return microbatches


def chunk_feeds(chunk: ModelChunk, count: int, **sizes: int) -> list[Feeds]:
    """Microbatches for a chunk."""
    return feeds_for(config_of(chunk), count, **sizes)


def config_of(chunk: ModelChunk) -> ModelConfig:
    """The config of a chunk's decoder."""
    assert isinstance(chunk.module, Decoder)
    return chunk.module.config


def verdict_of(chunk: ModelChunk, count: int = 3, engine_type: Any = Engine, **sizes: int) -> Verdict:
    """Compare one step of `count` microbatches with the reference."""
    return verify(chunk, [chunk_feeds(chunk, count, **sizes)], engine_type=engine_type)


def gradients_of(
    chunk: ModelChunk, microbatches: Sequence[Feeds], step: Any = train_step, **settings: Any
) -> dict[str, Any]:
    """Gradients of a copy of `chunk` after one step, by default the overlapped one."""
    chunk = copy.deepcopy(chunk)
    step(chunk, microbatches, **settings)
    return {name: parameter.grad for name, parameter in chunk.module.named_parameters()}


def reference_gradients(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> dict[str, Any]:
    """Gradients of a copy of `chunk` after one step of plain autograd."""
    return gradients_of(chunk, microbatches, step=reference_step)


def different(expected: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    """Names whose bits differ."""
    return compare(expected, found).different


def reference_values(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> list[dict[str, Any]]:
    """Every value of each microbatch in one autograd graph, after backward, with the gradients of the values."""
    program: Program = chunk.program
    scale = chunk.loss_scale.factor(microbatches, 1, None)
    result = []
    for number, feeds in enumerate(microbatches):
        values: dict[str, Any] = dict(feeds)
        for stage in program.stages:
            inputs = [v if program.nondiff(n) else border(v) for n, v in ((n, values[n]) for n in stage.reads)]
            written = forward_stage(chunk, stage, number, inputs, None, None)
            values.update(zip(stage.writes, written, strict=True))
            for name in stage.writes:
                if not program.nondiff(name) and values[name].requires_grad and not values[name].is_leaf:
                    values[name].retain_grad()
        start_backward(program, MicrobatchState(number, feeds, scale), values)
        result.append(values)
    return result
