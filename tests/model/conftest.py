"""Fixtures of the model tests: a hand-written loop over a program's stages, and feeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.ir import Program

Feeds = dict[str, Tensor]


@pytest.fixture
def run_program() -> Callable[[Program, Feeds], dict[str, Any]]:
    """Run the stages in program order in one autograd graph; returns every value by name."""

    def run(program: Program, feeds: Feeds) -> dict[str, Any]:
        values: dict[str, Any] = dict(feeds)
        for stage in program.stages:
            result = stage.forward(*(values[name] for name in stage.reads))
            values.update(zip(stage.writes, result if len(stage.writes) > 1 else (result,), strict=True))
        return values

    return run


@pytest.fixture
def make_feeds() -> Callable[..., Feeds]:
    """Random bytes: ids and labels [B, S]."""

    def make(batch: int = 2, sequence: int = 8, seed: int = 0) -> Feeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 256, (2, batch, sequence), generator=generator)
        return {"ids": drawn[0], "labels": drawn[1]}

    return make
