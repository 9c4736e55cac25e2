"""What the memory tests share: small decoders, their data, and both sides of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from overlap.chunk import ModelChunk
from overlap.engine import Engine, Feeds
from overlap.memory import Bin, MemoryRecorder, StorageTracker, Usage, gaps_of, measure_step, predict, zero_gradients
from overlap.memory.oracle import allocator_peak
from overlap.memory.tracker import tensors_of
from overlap.model import Decoder, ModelConfig
from overlap.scale import PerMicrobatch, PerToken
from overlap.step import train_step
from recompute import RecomputeConfig

none, uniform, block = RecomputeConfig.none(), RecomputeConfig.uniform, RecomputeConfig.block
VOCAB = 17


def decoder(
    recompute: RecomputeConfig | Sequence[RecomputeConfig] = none,
    *,
    order: str = "multi_queue",
    delay_wgrad: bool = False,
    lead: int = 0,
    **config: object,
) -> ModelChunk:
    """A small decoder; `config` are fields of ModelConfig."""
    shape = ModelConfig(vocab=VOCAB, **{"layers": 3, "hidden": 16, "kv_rank": 8, **config})
    scale = PerToken() if shape.per_token_loss else PerMicrobatch()
    settings: dict[str, Any] = {"order": order, "delay_wgrad": delay_wgrad, "lead": lead, "loss_scale": scale}
    return ModelChunk(Decoder(shape), recompute=recompute, **settings)


def tokens(microbatches: int, batch: int = 2, seq: int = 6) -> list[Feeds]:
    """Random ids and labels."""
    return [{name: torch.randint(VOCAB, (batch, seq)) for name in ("ids", "labels")} for _ in range(microbatches)]


def assert_exact(build: Callable[[], ModelChunk], microbatches: Sequence[Feeds]) -> Usage:
    """Measured and predicted bytes are equal at every slot border, so in every peak too."""
    measured = measure_step(build(), microbatches).usage
    assert_same(measured, predict(build, microbatches).usage)
    return measured


def assert_same(measured: Usage, predicted: Usage) -> None:
    """Equal at every border; names the first slot and the kinds that differ."""
    for left, right in zip(measured.curve, predicted.curve, strict=True):
        pairs = {kind.value: (left.bytes[kind], right.bytes[kind]) for kind in Bin}
        differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert left.slot == right.slot
        assert not differ, f"{left.slot}: (measured, predicted) {differ}"
    assert measured.as_json() == predicted.as_json()


def measure_with(engine_type: type[Engine], chunk: ModelChunk, microbatches: Sequence[Feeds]) -> Usage:
    """Measure a step of an engine in which a test broke something; the step itself may fail at its end."""
    zero_gradients(chunk)
    with StorageTracker() as tracker:
        recorder = MemoryRecorder(tracker, gaps_of(chunk, len(microbatches)))
        train_step(chunk, microbatches, observers=(recorder,), engine_type=engine_type)
    return recorder.usage


def first_pass(usage: Usage) -> list[dict[Bin, int]]:
    """The borders of the N slots of layers."""
    return [dict(border.bytes) for border in usage.curve if border.slot[0] == "N"]


def within(func: Callable[..., object], *args: object) -> int:
    """Bytes at the highest point of an operator beside its results, by the CPU allocator."""
    kept: list[object] = []
    with torch.no_grad():
        peak = allocator_peak(lambda: kept.append(func(*args)))
    given = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
    made = (tensor.untyped_storage() for tensor in tensors_of(kept))
    return peak - sum(storage.nbytes() for storage in made if storage._cdata not in given)
