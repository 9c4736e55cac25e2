"""A CUDA memory snapshot of a step names the slot of every allocation."""

import pickle
from functools import partial

import pytest
import torch

from overlap import ModelChunk, train_step
from overlap.memory.snapshot import record_snapshot
from overlap.model import Decoder, ModelConfig
from overlap.streams import StreamLanes
from recompute import RecomputeConfig

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
tokens = partial(torch.randint, 256, (2, 32), device=DEVICE)


def test_allocations_carry_their_slot(tmp_path) -> None:
    chunk = ModelChunk(
        Decoder(ModelConfig(layers=2)).to(DEVICE), recompute=RecomputeConfig.uniform(1), lanes=StreamLanes(DEVICE)
    )
    feeds = [{"ids": tokens(), "labels": tokens()} for _ in range(2)]
    train_step(chunk, feeds)
    with record_snapshot(tmp_path / "snapshot.pickle") as observer:
        train_step(chunk, feeds, observers=(observer,))
    if "_set_memory_metadata" not in vars(torch.cuda.memory):
        pytest.skip("this torch cannot tag allocations")
    with (tmp_path / "snapshot.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    tags = {event.get("user_metadata", "") for trace in snapshot["device_traces"] for event in trace}
    assert {"N0.0.attn", "R0.1.experts", "B1.0.attn"} <= tags
