"""Memory over many steps, garbage collection off: nothing is cached per step."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from overlap import train_step
from overlap.chunk import ModelChunk
from overlap.memory.trivial import Trivial
from recompute import RecomputeConfig
from recompute.config import Replay
from tests.cases.graveyard import containers, live_bytes
from tests.memory.compare import decoder, tokens, uniform

SETTLED = 20
Feeds = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def state() -> tuple[int, int, dict[str, int]]:
    """Live bytes of tensors, objects that the collector knows, sizes of all containers at module level."""
    return live_bytes(), len(gc.get_objects()), containers()


def trivial() -> tuple[ModelChunk, Feeds]:
    """Next to nothing but the engine; its stages hand on what they get, which a check would refuse."""
    chunk = ModelChunk(Trivial(1), recompute=RecomputeConfig.uniform(1, replay=Replay.HIDDEN))
    chunk.checked = True
    return chunk, [{"hidden": torch.ones(())} for _ in range(2)]


def after_steps(
    chunk: ModelChunk, feeds: Feeds, steps: int, leak: list[torch.Tensor]
) -> tuple[list[int], list[int], list[dict[str, int]]]:
    found = []
    for number in range(1, steps + 1):
        train_step(chunk, feeds)
        if number in (SETTLED, steps // 2, steps):
            found.append(state())
            leak += [torch.zeros(1) for _ in leak]
    sizes, objects, tables = zip(*found, strict=True)
    return list(sizes), list(objects), list(tables)


@pytest.mark.parametrize(("decoded", "steps"), [(False, 1000), (True, 60)], ids=["engine", "decoder"])
def test_many_steps_hold_what_twenty_hold(decoded, steps) -> None:
    chunk, feeds = (decoder(uniform(1), layers=2, delay_wgrad=True), tokens(2)) if decoded else trivial()
    sizes, objects, tables = after_steps(chunk, feeds, steps, [])
    assert sizes[0] == sizes[1] == sizes[2] > 0
    assert tables[0] == tables[1] == tables[2]
    # What is kept here of each look is all that there is more.
    assert objects[2] - objects[1] <= objects[1] - objects[0] < 50


def test_a_leak_of_a_few_bytes_is_seen() -> None:
    """Negative control."""
    chunk, feeds = trivial()
    sizes, _, _ = after_steps(chunk, feeds, 3 * SETTLED, [torch.zeros(1)])
    assert sizes[0] < sizes[2]
