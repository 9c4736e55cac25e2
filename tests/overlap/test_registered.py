"""What is put in a parameter's or buffer's place behind the chunk is trained, and kept, like what was there before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.reference import reference_step
from overlap.registered import Registered
from overlap.step import forward_only, train_step
from recompute import ConfigError, RecomputeConfig
from tests.overlap.programs import TinyModel, differences, result_of, tiny_chunk, tiny_feeds

uniform = RecomputeConfig.uniform
Change = Callable[[ModelChunk], object]


def model(chunk: ModelChunk) -> TinyModel:
    assert isinstance(chunk.module, TinyModel)
    return chunk.module


def assign_inside(chunk: ModelChunk) -> None:
    chunk.module.load_state_dict(copy.deepcopy(chunk.module.state_dict()), assign=True)


def assign_from_outside(chunk: ModelChunk) -> None:
    parent = nn.ModuleList([chunk])
    parent.load_state_dict(copy.deepcopy(parent.state_dict()), assign=True)


def put(chunk: ModelChunk) -> None:
    model(chunk).embedding = nn.Parameter(model(chunk).embedding.detach() * 2)


def put_layer(chunk: ModelChunk) -> None:
    model(chunk).layers[1] = copy.deepcopy(model(chunk).layers[1])


def put_buffer(chunk: ModelChunk) -> None:
    model(chunk)._layers()[0].scale = torch.full((1,), 3.0)


CHANGES: dict[str, Change] = {
    "chunk.double": lambda chunk: chunk.double(),
    "module.double": lambda chunk: chunk.module.double(),
    "parent.double": lambda chunk: nn.ModuleList([chunk]).double(),
    "module.assign": assign_inside,
    "parent.assign": assign_from_outside,
    "chunk.assign": lambda chunk: chunk.load_state_dict(copy.deepcopy(chunk.state_dict()), assign=True),
    "parameter": put,
    "layer": put_layer,
    "buffer": put_buffer,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_is_there_at_the_step_is_trained(change: Change) -> None:
    """Most of the model is frozen while it is replaced, so that the old parameters would say what trains."""
    chunk = tiny_chunk("MM", shape={"stateful": True, "shared": True}, recompute=uniform(1))
    chunk.module.requires_grad_(False)
    model(chunk).unembedding.requires_grad_(True)
    train_step(chunk, tiny_feeds(1))
    change(chunk)
    chunk.module.requires_grad_(True)
    chunk.zero_grad(set_to_none=True)
    fresh = ModelChunk(copy.deepcopy(chunk.module), recompute=uniform(1))
    fresh.steps_done = chunk.steps_done
    for one in (chunk, fresh):
        train_step(one, tiny_feeds(2))
    assert differences(result_of(fresh), result_of(chunk)) == []
    trained = [name for name, p in chunk.module.named_parameters() if p.grad is not None]
    assert trained == [name for name, _ in chunk.module.named_parameters()]


@pytest.mark.parametrize("step", [train_step, forward_only, reference_step, contiguous_step])
def test_every_kind_of_step_begins_with_it(step: Any) -> None:
    chunk = tiny_chunk("D")
    program = chunk.program
    step(chunk, tiny_feeds(1))
    assert chunk.program is program
    assign_inside(chunk)
    step(chunk, tiny_feeds(1))
    assert chunk.program is not program
    own = {id(parameter) for parameter in chunk.parameters()}
    assert {id(p) for stage in chunk.program.stages for p in stage.parameters} <= own


def test_a_step_keeps_what_was_bound() -> None:
    """Neither steps, nor freezing, nor an optimizer's update cost new plans."""
    chunk = tiny_chunk("MD", shape={"stateful": True, "tied": True}, recompute=uniform(1))
    optimizer = torch.optim.SGD(chunk.parameters(), lr=0.1)
    planner = chunk.planner
    for frozen in (False, True, False):
        model(chunk).layers.requires_grad_(not frozen)
        train_step(chunk, tiny_feeds(2))
        optimizer.step()
        optimizer.zero_grad()
    assert chunk.planner is planner


def test_the_new_parameters_are_checked() -> None:
    chunk = tiny_chunk("M")
    train_step(chunk, tiny_feeds(1))
    assert chunk.checked
    chunk.double()
    assert not chunk.checked


@pytest.mark.parametrize("convert", [lambda c: c.half(), lambda c: c.to(torch.float16), lambda c: c.module.half()])
def test_float16_is_refused_whenever_it_comes(convert: Change) -> None:
    chunk = tiny_chunk("M")
    with pytest.raises(ConfigError, match=r"dtype=torch\.float16: float16 needs a loss scaler"):
        (convert(chunk), train_step(chunk, tiny_feeds(1)))
    with pytest.raises(ConfigError, match=r"dtype=torch\.float16: float16 needs a loss scaler"):
        train_step(chunk, tiny_feeds(1))
    chunk.float()
    train_step(chunk, tiny_feeds(1))


class Norms(nn.Module):
    """What may change in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("empty", None)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_buffer("table", torch.zeros(2)),
        lambda m: m.register_buffer("empty", torch.zeros(2)),
        lambda m: m.register_buffer("more", torch.zeros(2)),
        lambda m: m.register_parameter("more", None),
        lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(2))),
        lambda m: setattr(m, "inner", nn.BatchNorm1d(2)),
        lambda m: delattr(m.inner, "bias"),
        lambda m: setattr(m.inner.weight, "data", torch.ones(2).double()),
    ],
)
def test_still(change: Callable[[Any], object]) -> None:
    module = Norms()
    before = Registered.of(module)
    module.inner(torch.ones(3, 2))
    module.requires_grad_(False)
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert before.still()
    change(module)
    assert not before.still()
    assert Registered.of(module).still()
