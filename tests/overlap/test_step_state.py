"""Buffers that stages change in place: what graphs save of them, and that a step that fails leaves them alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Op, Program
from overlap.lanes import NullLanes
from overlap.lower import Issue
from overlap.memory import measure_peak, predict_peak
from overlap.reference import reference_step
from overlap.step import forward_only, train_step
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


class Unshared(Scaled):
    """The same without a shared weight: every layer reads its input alone."""

    def program(self) -> Program:
        b = ProgramBuilder()
        x = b.input("x", needs_grad=True)
        for index in range(2):
            with b.layer(index):
                (x,) = b.compute(
                    "mix", lambda x, index=index: self.layer(index, x, self.weights[index]), x, outputs=("x",),
                    parameters=(self.weights[index],), state=(self.get_buffer(f"scale_{index}"),),
                )  # fmt: skip
        b.loss(b.compute("head", lambda x: x.square().mean(), x, outputs=("loss",))[0])
        return b.build()


def scaled_chunk(model: type[Scaled] = Scaled, **settings: Any) -> ModelChunk:
    torch.manual_seed(0)
    return ModelChunk(model(), order="plain", **settings)


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


class Spy(NullLanes):
    """Stand-in lanes of several streams: whether they are joined."""

    def __init__(self) -> None:
        self.joined = True

    def begin(self, issue: Issue, owner: Any) -> None:
        """The issue's kernels may run from now on."""
        self.joined = False

    def finish(self) -> None:
        """All have run."""
        self.joined = True


class Tripped(Exception):
    """What the tests below raise."""


class Trip:
    """An observer that raises before the first backward slot of the last microbatch."""

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.BACKWARD and owner.number == 1:
            raise Tripped

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing."""


@pytest.mark.parametrize("fails", [True, False])
def test_state_is_put_back_when_the_lanes_are_joined(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, kernels of other lanes may still write to it. Forward alone puts it back always."""
    lanes = Spy()
    chunk = scaled_chunk(recompute=none(), lanes=lanes)
    train_step(chunk, fed(2))
    before = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    joined: list[bool] = []
    put = state.put

    def watched(*arguments: Any) -> None:
        joined.append(lanes.joined)
        put(*arguments)

    monkeypatch.setattr(state, "put", watched)
    if fails:
        with pytest.raises(Tripped):
            train_step(chunk, fed(2), observers=(Trip(),))
    else:
        forward_only(chunk, fed(2))
    assert joined == [True] * 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in chunk.named_buffers())


def test_a_gradient_that_cannot_be_returned_leaves_state_as_it_was() -> None:
    """Feeds that share a graph: the caller's own backward fails at the second of them, when the slots are done."""
    chunk, plain = scaled_chunk(), scaled_chunk()
    for one in (chunk, plain):
        train_step(one, fed(2))
        one.zero_grad()
    before = result_of(chunk)
    whole = torch.exp(torch.ones(6, WIDTH, requires_grad=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        train_step(chunk, [{"x": x} for x in whole.split(3)])
    chunk.zero_grad()
    assert differences(before, result_of(chunk)) == []
    for one in (chunk, plain):
        train_step(one, fed(2))
    assert differences(result_of(chunk), result_of(plain)) == []


def test_leftovers_leave_state_as_it_was() -> None:
    class Hoard(Engine):
        def issue(self, issue: Issue, owner: MicrobatchState) -> None:
            super().issue(replace(issue, frees=()), owner)

    chunk = scaled_chunk()
    before = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    with pytest.raises(RuntimeError, match="do not consume what they make"):
        train_step(chunk, fed(1), engine_type=Hoard)
    assert all(torch.equal(buffer, before[name]) for name, buffer in chunk.named_buffers())


@pytest.mark.parametrize("step", [reference_step, contiguous_step, train_step])
def test_a_microbatch_that_does_not_fit_leaves_state_as_it_was(step: Any) -> None:
    """The first one has moved it when the second one fails."""
    chunk = scaled_chunk(Unshared)
    step(chunk, fed(1))
    before = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    assert not all(torch.equal(buffer, torch.ones(WIDTH)) for buffer in before.values())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        step(chunk, [*fed(1), {"x": torch.ones(3, WIDTH + 1)}])
    assert all(torch.equal(buffer, before[name]) for name, buffer in chunk.named_buffers())
