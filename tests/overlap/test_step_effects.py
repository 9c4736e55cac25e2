"""Effects of a step are all or nothing: one that raises leaves none behind, and a retry is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from overlap.chunk import ModelChunk
from overlap.ir import Program, Stage
from overlap.step import train_step
from recompute import RecomputeConfig
from tests.overlap.programs import TinyModel, differences, result_of, tiny_chunk, tiny_feeds

EVERYTHING = {"tied": True, "shared": True, "dropout": 0.2, "stateful": True}


class Counting(TinyModel):
    """A tiny model whose effects count down, and raise behind the one that reaches 0."""

    left: int = -1

    def program(self) -> Program:
        program = super().program()
        return replace(program, stages=tuple(self._counting(stage) for stage in program.stages))

    def _counting(self, stage: Stage) -> Stage:
        def apply(value: Any, inner: Callable[[Any], None]) -> None:
            inner(value)
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("mine")

        effects = (replace(effect, apply=partial(apply, inner=effect.apply)) for effect in stage.effects)
        return replace(stage, effects=tuple(effects))


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_an_effect_that_raises_leaves_no_effect_behind(failing: int) -> None:
    """R16: earlier effects of the step, and what stages changed in place, are undone."""
    torch.manual_seed(7)
    model = Counting("MM", **EVERYTHING)
    chunk = ModelChunk(model, recompute=RecomputeConfig.uniform(1))
    plain = tiny_chunk("MM", shape=EVERYTHING)
    for one in (chunk, plain):
        train_step(one, tiny_feeds(2))
        one.zero_grad(set_to_none=True)
    before = result_of(chunk)
    model.left = failing
    with pytest.raises(RuntimeError, match="mine"):
        train_step(chunk, tiny_feeds(2))
    chunk.zero_grad(set_to_none=True)
    assert differences(before, result_of(chunk)) == []
    assert chunk.steps_done == 1
    for one in (chunk, plain):
        train_step(one, tiny_feeds(2))
    assert differences(result_of(chunk), result_of(plain)) == []
    assert any(name.startswith("buffer") for name in differences(before, result_of(chunk)))
