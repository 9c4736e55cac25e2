"""check_stages and what is around it: fed values, the caller's autocast, the modes of modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder
from overlap.check import check_stages
from overlap.chunk import ModelChunk
from overlap.errors import ProgramError
from overlap.step import train_step
from tests.overlap.programs import Own

FEEDS = {"x": torch.ones(2, 3)}


def chunk_of(forward: Callable[[Any, Tensor], Tensor], **declared: Any) -> ModelChunk:
    """A chunk whose stage `mine` reads what stage `embed` wrote."""

    def build(module: Any, b: ProgramBuilder) -> None:
        (h,) = b.compute("embed", lambda x: x * module.first, b.input("x"), outputs=("h",), parameters=(module.first,))
        (y,) = b.compute("mine", lambda h: forward(module, h), h, outputs=("y",), **declared)
        b.loss(b.compute("head", lambda y: y.square().sum(), y, outputs=("loss",))[0])

    return ModelChunk(Own(build, first=nn.Parameter(torch.ones(3)), seen=torch.zeros(1)))


def dropping(module: Any, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, module.training)


def test_what_draws_in_train_mode_only_is_checked_there() -> None:
    """A first step in eval mode says nothing of a dropout."""
    chunk = chunk_of(dropping)
    chunk.eval()
    train_step(chunk, [FEEDS])
    assert chunk.checked
    chunk.train()
    assert not chunk.checked
    with pytest.raises(ProgramError, match="stage mine draws random numbers"):
        train_step(chunk, [FEEDS])


def test_modes_in_turn_are_checked_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, modes = chunk_of(lambda m, h: h * 2), []

    def watched(chunk: ModelChunk, feeds: Any) -> None:
        modes.append(chunk.module.training)
        check_stages(chunk, feeds)

    monkeypatch.setattr("overlap.step.check_stages", watched)
    for mode in (True, False, True, True, False):
        train_step(chunk.train(mode), [FEEDS])
    assert modes == [True, False]


OWN = torch.Generator().manual_seed(0)


def counted(module: Any, h: Tensor) -> Tensor:
    module.seen.add_(1)
    result: Tensor = h * torch.rand(3) * module.seen
    return result


@pytest.mark.parametrize(
    ("forward", "refused"),
    [
        (lambda m, h: h * torch.rand(3, generator=OWN), True),
        (lambda m, h: h * random.random(), True),
        (lambda m, h: h * torch.rand(3), False),
        (lambda m, h: h * torch.rand(3, generator=torch.Generator().manual_seed(0)), False),
        (counted, False),
    ],
)
def test_what_a_stage_draws_is_decided_by_its_seed(forward: Callable[[Any, Tensor], Tensor], refused: bool) -> None:
    """A replay would draw other numbers from a generator that nobody seeds."""
    chunk = chunk_of(forward, draws_rng=True)
    object.__setattr__(chunk.program.by_key[None, "mine"], "state", (chunk.get_buffer("module.seen"),))
    state = torch.get_rng_state()
    message = r"stage mine gives another 'y' when it runs again from the same seed"
    with pytest.raises(ProgramError, match=message) if refused else nullcontext():
        check_stages(chunk, FEEDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(chunk.get_buffer("module.seen"), torch.zeros(1))


def fed_to(forward: Callable[[Any, Tensor], Tensor]) -> ModelChunk:
    """A chunk whose stage `mine` reads the fed value."""

    def build(module: Any, b: ProgramBuilder) -> None:
        x = b.input("x")
        (h,) = b.compute("mine", lambda x: forward(module, x), x, outputs=("h",), parameters=(module.first,))
        (y,) = b.compute("other", lambda h, x: h + x, h, x, outputs=("y",))
        b.loss(b.compute("head", lambda y: y.square().sum(), y, outputs=("loss",))[0])

    return ModelChunk(Own(build, first=nn.Parameter(torch.ones(3))))


@pytest.mark.parametrize(
    ("forward", "refused"),
    [
        (lambda m, x: x.mul_(2) * m.first, True),
        (lambda m, x: x.data.mul_(2) * m.first, True),
        (lambda m, x: x.view(-1).mul_(2).view(2, 3) * m.first, True),
        (lambda m, x: x.clone().mul_(2) * m.first, False),
    ],
)
def test_what_is_fed_is_not_changed_in_place(forward: Callable[[Any, Tensor], Tensor], refused: bool) -> None:
    """The caller's tensor stays as it was, whether the program is refused or not."""
    feeds = {"x": torch.ones(2, 3)}
    chunk = fed_to(forward)
    message = r"stage mine changes 'x', which it reads, in place: change a copy"
    with pytest.raises(ProgramError, match=message) if refused else nullcontext():
        train_step(chunk, [feeds])
    assert torch.equal(feeds["x"], torch.ones(2, 3))
    assert feeds["x"]._version == 0


def test_what_another_stage_wrote_is_not_changed_in_place() -> None:
    with pytest.raises(ProgramError, match="stage mine changes 'h', which it reads, in place"):
        train_step(chunk_of(lambda m, h: h.detach().mul_(2) + h), [FEEDS])


def test_feeds_of_any_kind_pass() -> None:
    """Not a number is itself; tensors of inference mode have no version."""
    with torch.inference_mode():
        made_there = torch.ones(2, 3)
    for x in (torch.full((2, 3), float("nan")), made_there, torch.ones(3).expand(2, 3), torch.ones(3, 2).t()):
        check_stages(fed_to(lambda m, x: x * m.first), {"x": x})


def test_stages_are_checked_in_the_precision_of_a_step() -> None:
    """Autocast is on, and caches nothing that a forward of the caller's, behind an optimizer step, would find."""
    seen: list[tuple[bool, torch.dtype]] = []

    def product(module: Any, h: Tensor) -> Tensor:
        y: Tensor = h @ module.second
        seen.append((torch.is_autocast_cache_enabled(), y.dtype))
        return y

    weight = nn.Parameter(torch.ones(3, 3))

    def build(module: Any, b: ProgramBuilder) -> None:
        (y,) = b.compute("mine", lambda x: product(module, x), b.input("x"), outputs=("y",), parameters=(weight,))
        b.loss(b.compute("head", lambda y: y.square().sum(), y, outputs=("loss",))[0])

    chunk = ModelChunk(Own(build, second=weight))
    with torch.autocast("cpu", torch.bfloat16):
        check_stages(chunk, FEEDS)
        with torch.no_grad():
            weight.mul_(2)
        after = FEEDS["x"] @ weight
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    assert seen == [(False, torch.bfloat16)]
    assert after.tolist() == [[6.0] * 3] * 2
