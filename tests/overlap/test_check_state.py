"""In-place state that several stages see: each declares it, or the program is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder
from overlap.check_state import ChangingState
from overlap.chunk import ModelChunk
from overlap.errors import ProgramError, ScheduleError
from overlap.reference import reference_step
from overlap.step import train_step
from recompute import RecomputeConfig
from tests.overlap.programs import Own, differences, result_of

WIDTH, LAYERS = 4, 3
uniform, none = RecomputeConfig.uniform, RecomputeConfig.none
Shift = Callable[[Any], Tensor]


def fed(microbatches: int = 3) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, WIDTH, generator=source)} for _ in range(microbatches)]


def move(module: Any, h: Tensor) -> Tensor:
    module.mean.mul_(0.5).add_(h.detach().mean(0))
    return h * 1.5


def shifted(one_stage: bool, shift: Shift, *, declared: bool = True, **settings: Any) -> ModelChunk:
    """Layers that shift by a running mean which a later stage moves: in one stage, or with the mean as a value."""

    def build(module: Any, b: ProgramBuilder) -> None:
        h = b.input("x")
        for index, weight in enumerate(module.weights):
            with b.layer(index):
                own: dict[str, Any] = {"parameters": (weight,), "outputs": ("mixed",)}
                state = (module.mean,) if declared else ()
                if one_stage:
                    mix = lambda h, w=weight: torch.tanh(h @ w + shift(module))  # noqa: E731
                    (mixed,) = b.compute("mix", mix, h, state=state, **own)
                else:
                    (by,) = b.compute("shift", lambda: shift(module), outputs=(), nondiff=("by",), state=state)
                    (mixed,) = b.compute("mix", lambda h, by, w=weight: torch.tanh(h @ w + by), h, by, **own)
                (h,) = b.compute("move", lambda h: move(module, h), mixed, outputs=("h",), state=(module.mean,))
        b.loss(b.compute("head", lambda h: h.square().mean(), h, outputs=("loss",))[0])

    torch.manual_seed(0)
    weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(LAYERS))
    return ModelChunk(Own(build, weights=weights, mean=torch.zeros(WIDTH)), order="plain", **settings)


@pytest.mark.parametrize(
    ("one_stage", "shift", "declared", "message"),
    [
        (True, lambda m: m.mean.clone(), False, "stage 0.mix reads buffer 'mean', which stage 0.move changes in place"),
        (False, lambda m: m.mean * 1, False, "stage 0.shift reads buffer 'mean', which stage 0.move changes in place"),
        (False, lambda m: m.mean, False, "stage 0.shift writes '0.by', which is buffer 'mean' itself"),
        (False, lambda m: m.mean, True, "stage 0.shift writes '0.by', which is buffer 'mean' itself"),
        (False, lambda m: {"list": [m.mean[1:]]}, True, "stage 0.shift writes '0.by', which is buffer 'mean' itself"),
    ],
)
def test_state_of_another_stage_is_declared(one_stage: bool, shift: Shift, declared: bool, message: str) -> None:
    chunk = shifted(one_stage, shift, declared=declared, recompute=uniform(1))
    with pytest.raises(ProgramError, match=message.replace(".", r"\.")):
        train_step(chunk, fed())
    assert torch.equal(chunk.get_buffer("module.mean"), torch.zeros(WIDTH))
    assert chunk.steps_done == 0


def compared(chunk: ModelChunk, other: ModelChunk) -> list[str]:
    for _ in range(2):
        reference_step(chunk, fed())
        train_step(other, fed())
    return differences(result_of(chunk), result_of(other))


@pytest.mark.parametrize("one_stage", [True, False])
@pytest.mark.parametrize("config", [none(), uniform(1), uniform(2)], ids=str)
def test_declared_state_is_seen_as_in_the_first_pass(config: RecomputeConfig, one_stage: bool) -> None:
    chunks = [shifted(one_stage, lambda m: m.mean.clone(), recompute=config) for _ in range(2)]
    assert compared(*chunks) == []


@pytest.mark.parametrize("undeclared", [True, False])
def test_control_unchecked_state_goes_wrong(undeclared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that reads what later microbatches left gives other gradients, and nobody else says so."""
    monkeypatch.setattr(ChangingState, "__init__", lambda self, program, buffers: setattr(self, "_changed_by", {}))
    shift = (lambda m: m.mean.clone()) if undeclared else (lambda m: m.mean)
    chunks = [shifted(undeclared, shift, declared=not undeclared, recompute=uniform(1)) for _ in range(2)]
    assert "grad module.weights.0" in compared(*chunks)


def test_reading_what_nobody_changes_is_fine() -> None:
    def build(module: Any, b: ProgramBuilder) -> None:
        (by,) = b.compute("shift", lambda: module.fixed, outputs=(), nondiff=("by",))
        (h,) = b.compute(
            "mix", lambda x, by: x * module.w + by, b.input("x"), by, outputs=("h",), parameters=(module.w,)
        )
        b.loss(b.compute("move", lambda h: move(module, h).sum(), h, outputs=("loss",), state=(module.mean,))[0])

    members = {"w": nn.Parameter(torch.ones(WIDTH)), "fixed": torch.ones(WIDTH), "mean": torch.zeros(WIDTH)}
    train_step(ModelChunk(Own(build, **members)), fed())


@pytest.mark.parametrize("lead", [0, 1, 2, LAYERS])
def test_state_of_several_layers_sees_one_microbatch_after_another(lead: int) -> None:
    """A longer lead would run the second microbatch's first layer before the first one's last moves their buffer."""
    chunks = [shifted(True, lambda m: m.mean.clone(), lead=lead) for _ in range(2)]
    if lead < 2:
        assert compared(*chunks) == []
        return
    with pytest.raises(ScheduleError, match=r"F2\.0\.mix changes state in place before .* of the microbatch ahead did"):
        train_step(chunks[1], fed())
