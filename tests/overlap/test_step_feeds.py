"""Feeds of a step: what a replay reads is a copy, and a gradient goes back only where its input says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.memory import MemoryRecorder
from overlap.reference import reference_step
from overlap.step import forward_only, train_step
from recompute import ConfigError, RecomputeConfig
from tests.overlap.programs import Own

uniform, none = RecomputeConfig.uniform, RecomputeConfig.none
CONFIGS = [none(), uniform(1)]


def reading(module: Any, b: ProgramBuilder) -> None:
    """One layer, which reads a fed tensor and a fed object."""
    x, other = b.input("x"), b.input("other")
    with b.layer(0):
        (y,) = b.compute("attn", lambda x, other: x * module.w, x, other, outputs=("y",), parameters=(module.w,))
    b.loss(b.compute("head", lambda y: y.sum(), y, outputs=("loss",))[0])


def reader(config: RecomputeConfig) -> ModelChunk:
    return ModelChunk(Own(reading, w=nn.Parameter(torch.ones(4))), recompute=config, order="plain")


def test_a_feed_that_cannot_be_copied_is_refused_where_a_replay_reads_it() -> None:
    feeds = [{"x": torch.ones(4), "other": threading.Lock()}]
    train_step(reader(none()), feeds)
    chunk = reader(uniform(1))
    with pytest.raises(ConfigError, match=r"^other='lock': is read again by a replay, .*cannot pickle") as raised:
        train_step(chunk, feeds)
    assert isinstance(raised.value.__cause__, TypeError)
    assert chunk.steps_done == 0
    train_step(chunk, [{"x": torch.ones(4), "other": [torch.ones(1), "text"]}])


GRADIENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "x": lambda: {"x": torch.ones(4, requires_grad=True), "other": None},
    "other": lambda: {"x": torch.ones(4), "other": {"mask": [torch.ones(4, requires_grad=True) * 2]}},
}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("step", [train_step, reference_step, contiguous_step])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_not_declared_is_refused(step: Any, config: RecomputeConfig, name: str) -> None:
    """Whatever the recompute rule: else it arrived without recompute and was missing with it."""
    rule = rf"microbatches\[1\]\['{name}'\]=.*requires grad.*: declare input\('{name}', needs_grad=True\), or detach"
    with pytest.raises(ConfigError, match=rule):
        step(reader(config), [{"x": torch.ones(4), "other": None}, GRADIENTS[name]()])


def test_without_backward_any_feed_will_do() -> None:
    (losses,) = forward_only(reader(none()), [GRADIENTS["x"]()])
    with torch.no_grad():
        (again,) = train_step(reader(uniform(1)), [GRADIENTS["x"]()])
    assert losses["loss"].item() == again["loss"].item() == 4.0
    assert not losses["loss"].requires_grad


@pytest.mark.parametrize("step", [train_step, reference_step, contiguous_step, forward_only])
@pytest.mark.parametrize("feeds", [None, "x", 1, [], {}, [None], [1], ["x"], [["x", "other"]], [{1: 2, "x": 3}]])
def test_microbatches_that_are_no_mappings(step: Any, feeds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^microbatches(\[0\])?=.*: (must feed exactly|a step needs at least one)"):
        step(reader(none()), feeds)


GOOD = [{"x": torch.ones(4), "other": None}]


@pytest.mark.parametrize("step", [train_step, reference_step, contiguous_step])
@pytest.mark.parametrize("accumulate", [None, 0, 1.0, True, "1"])
def test_accumulate(step: Any, accumulate: Any) -> None:
    with pytest.raises(ConfigError, match=r"^accumulate=.*: must be an integer of at least 1"):
        step(reader(none()), GOOD, accumulate)


@pytest.mark.parametrize("step", [train_step, reference_step])
@pytest.mark.parametrize("last", [None, 0, "no"])
def test_last(step: Any, last: Any) -> None:
    """A text would be true."""
    with pytest.raises(ConfigError, match=r"^last=.*: must be True or False"):
        step(reader(none()), GOOD, 2, last=last)


def test_observers_watch() -> None:
    chunk = reader(none())
    nobody: Any = None
    with pytest.raises(ConfigError, match="observers=None: must be a list of observers"):
        train_step(chunk, GOOD, observers=nobody)
    observers: Any = [MemoryRecorder]
    with pytest.raises(ConfigError, match=r"^observers=.*: must be observers: each has before\(\) and after\(\)"):
        train_step(chunk, GOOD, observers=observers)
    assert chunk.steps_done == 0
    assert chunk.module.w.grad is None


def rounding(module: Any, b: ProgramBuilder) -> None:
    """A product with what is fed, whose weight gradient rounds as the feed lies in memory."""
    x = b.input("x")
    with b.layer(0):
        mix = lambda x: torch.tanh(F.linear(x, module.w)) + x.mean(0) + x.sum(1, keepdim=True)  # noqa: E731
        (y,) = b.compute("attn", mix, x, outputs=("y",), parameters=(module.w,))
    b.loss(b.compute("head", lambda y: y.square().mean(), y, outputs=("loss",))[0])


@pytest.mark.parametrize("where", ["slice", "not aligned", "transposed"])
def test_a_replay_rounds_as_the_first_pass(where: str) -> None:
    source = torch.Generator().manual_seed(0)
    big = torch.randn(64, 38, generator=source)
    x = {"slice": big[1:38, 3:11], "not aligned": big.flatten()[1:297].view(37, 8), "transposed": big[:8, :37].t()}
    w = torch.randn(8, 8, generator=source)
    expected, found = (
        ModelChunk(Own(rounding, w=nn.Parameter(w.clone())), recompute=uniform(1), order="plain") for _ in range(2)
    )
    reference_step(expected, [{"x": x[where]}])
    train_step(found, [{"x": x[where]}])
    assert torch.equal(expected.module.w.grad, found.module.w.grad)


def carrying(module: Any, b: ProgramBuilder) -> None:
    x = b.input("x", needs_grad=True)
    b.loss(b.compute("head", lambda x: (x * module.w).sum(), x, outputs=("loss",), parameters=(module.w,))[0])


@pytest.mark.parametrize("step", [train_step, reference_step])
@pytest.mark.parametrize("value", [torch.ones(4, dtype=torch.int64), [torch.ones(4)]], ids=["int64", "list"])
def test_what_cannot_carry_the_declared_gradient_is_refused(step: Any, value: Any) -> None:
    chunk = ModelChunk(Own(carrying, w=nn.Parameter(torch.ones(4))), order="plain")
    rule = r"microbatches\[0\]\['x'\]=.*is declared with needs_grad=True: feed a tensor of a type that can have"
    with pytest.raises(ConfigError, match=rule):
        step(chunk, [{"x": value}])
    step(chunk, [{"x": torch.ones(4)}])
