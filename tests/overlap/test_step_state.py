"""Buffers that stages change in place: what graphs save of them, and that a step that fails leaves them alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.ir import Program
from overlap.memory import measure_peak, predict_peak
from overlap.reference import reference_step
from overlap.step import train_step
from recompute import RecomputeConfig, state
from tests.overlap.programs import differences, late_linear, result_of

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none
WIDTH = 4


class Scaled(nn.Module):
    """Two layers that use a shared weight twice, each with a scale that its graph saves right after it moved."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        for index in range(2):
            self.register_buffer(f"scale_{index}", torch.ones(WIDTH))

    def layer(self, index: int, x: Tensor, shared: Tensor) -> Tensor:
        scale, weight = self.get_buffer(f"scale_{index}"), self.weights[index]
        y = late_linear(torch.tanh(late_linear(x, weight)), weight)
        y = late_linear(torch.tanh(late_linear(y, shared)), shared)
        scale.mul_(0.5).add_(y.detach().abs().mean(0))
        return y * scale

    def program(self) -> Program:
        b = ProgramBuilder()
        x, shared = b.input("x", needs_grad=True), b.parameter("shared", self.shared)
        for index in range(2):
            with b.layer(index):
                (x,) = b.compute(
                    "mix", lambda x, shared, index=index: self.layer(index, x, shared), x, shared, outputs=("x",),
                    wgrad=True, parameters=(self.weights[index],), state=(self.get_buffer(f"scale_{index}"),),
                )  # fmt: skip
        b.loss(b.compute("head", lambda x: x.square().mean(), x, outputs=("loss",))[0])
        return b.build()


def scaled_chunk(**settings: Any) -> ModelChunk:
    torch.manual_seed(0)
    return ModelChunk(Scaled(), order="plain", **settings)


def fed(microbatches: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, WIDTH, generator=source)} for _ in range(microbatches)]


@pytest.mark.parametrize("delay_wgrad", [False, True])
@pytest.mark.parametrize("config", [none(), uniform(1), uniform(2), block(1)], ids=str)
def test_a_buffer_that_the_graph_saves(
    config: RecomputeConfig, delay_wgrad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a stage's graph and its backward the next microbatch moves the buffer on."""
    results = []
    for step, chunk in (
        (reference_step, scaled_chunk()),
        (train_step, scaled_chunk(recompute=config, delay_wgrad=delay_wgrad)),
    ):
        for _ in range(2):
            step(chunk, fed(3))
        results.append(result_of(chunk))
    assert differences(*results) == []
    assert not any(value is None for value in results[1].values())
    monkeypatch.setattr(state, "saving_copies", lambda buffers: nullcontext())
    chunk = scaled_chunk(recompute=config, delay_wgrad=delay_wgrad)
    if config == none():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train_step(chunk, fed(3))
    else:
        for _ in range(2):
            train_step(chunk, fed(3))
        assert "grad module.weights.0" in differences(results[0], result_of(chunk))


@pytest.mark.parametrize("config", [none(), uniform(1)], ids=str)
def test_the_copies_are_predicted(config: RecomputeConfig) -> None:
    build = lambda: scaled_chunk(recompute=config)  # noqa: E731
    assert predict_peak(build, fed(3)).bytes == measure_peak(build(), fed(3))
