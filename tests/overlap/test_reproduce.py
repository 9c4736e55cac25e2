"""An arm that does not reproduce itself is found before arms are compared."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from overlap import ModelChunk
from overlap.engine import Engine
from overlap.model import Decoder, ModelConfig
from overlap.reproduce import deterministic, reproduce
from recompute import RecomputeConfig


def chunk() -> ModelChunk:
    return ModelChunk(Decoder(ModelConfig(layers=1, hidden=8, dropout=0.1)), recompute=RecomputeConfig.uniform(1))


def batches() -> list[list[dict[str, torch.Tensor]]]:
    tokens = torch.randint(256, (1, 1, 1, 5), generator=torch.Generator().manual_seed(0))
    return [[{"ids": t[:, :-1], "labels": t[:, 1:]} for t in step] for step in tokens]


def test_both_arms():
    verdicts = reproduce(chunk(), batches())
    assert {name: verdict.equal for name, verdict in verdicts.items()} == {"reference": True, "overlap": True}


def test_an_arm_that_differs_from_itself():
    """Control: another seed at every draw."""
    seeds = count()

    class Restless(Engine):
        def seed_of(self, stage: Any, owner: Any) -> int:
            return next(seeds)

    verdicts = reproduce(chunk(), batches(), engine_type=Restless)
    assert {name: verdict.equal for name, verdict in verdicts.items()} == {"reference": True, "overlap": False}


def test_deterministic_leaves_a_cpu_alone():
    with deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(torch.device("meta")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
