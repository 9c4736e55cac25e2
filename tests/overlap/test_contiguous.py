"""The contiguous step: checkpoint_layers() under a program, the same numbers without overlap."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import (
    ModelChunk,
    PerMicrobatch,
    PerToken,
    Program,
    ProgramBuilder,
    ProgramError,
    reference_step,
    train_step,
)
from overlap.contiguous import contiguous_step
from overlap.model import Decoder, ModelConfig
from overlap.verify import verify
from recompute import RecomputeConfig

U, B = RecomputeConfig.uniform, RecomputeConfig.block
RULES = [RecomputeConfig.none(), U(1), U(2), U(9), B(1), B(3)]


def make(rule: Any, **changes: Any) -> ModelChunk:
    config = ModelConfig(**{"layers": 3, "hidden": 16, "vocab": 32, **changes})
    scale = PerToken() if config.per_token_loss else PerMicrobatch()
    return ModelChunk(Decoder(config), recompute=rule, loss_scale=scale)


def batches(microbatches: int = 2, steps: int = 2) -> list[list[dict[str, Tensor]]]:
    drawn = torch.randint(32, (steps, microbatches, 2, 2, 8), generator=torch.Generator().manual_seed(0))
    return [[{"ids": ids, "labels": labels} for ids, labels in step] for step in drawn]


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1, "attention_dropout": 0.1, "jitter": 0.1},
        {"dense_layers": 1, "shared_width": 0, "score": "softmax"},
        {"tied": True, "per_token_loss": True, "dtype": "bfloat16"},
        {"layers": 0, "dropout": 0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_overlapped_step(rule: RecomputeConfig, changes: dict[str, Any]) -> None:
    """Losses, gradients, buffers and generator state of two steps, contiguous beside overlapped."""
    verdict = verify(make(rule, **changes), batches(), reference=contiguous_step)
    assert verdict.gradients.different == ()
    assert verdict.equal


def test_a_config_per_microbatch() -> None:
    assert verify(make([RULES[0], U(1)]), batches(), reference=contiguous_step).equal


def test_another_seed_is_seen() -> None:
    """Negative control."""

    def other(chunk: ModelChunk, microbatches: Any) -> Any:
        chunk.seed += 1
        return contiguous_step(chunk, microbatches)

    assert not verify(make(U(1), dropout=0.1), batches(), reference=other).equal


def test_layers_run_twice_and_choose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputed layer runs its stages again, with the pinned routing."""
    chunk = make(B(2))
    runs: dict[int, list[bool]] = {layer: [] for layer in range(3)}
    for layer in range(3):
        router = chunk.get_submodule(f"module.layers.{layer}.router")

        def forward(*args: Any, layer: int = layer, real: Any = router.forward, **keywords: Any) -> Any:
            runs[layer].append((args[1:] or (keywords.get("pinned"),))[0] is not None)
            return real(*args, **keywords)

        monkeypatch.setattr(router, "forward", forward)
    contiguous_step(chunk, batches(1)[0])
    assert runs == {0: [False, True], 1: [False, True], 2: [False]}


class Sideways(nn.Module):
    """Layers that hand two values on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def program(self) -> Program:
        b = ProgramBuilder()
        one = two = b.input("x")
        for index, layer in enumerate(self.layers):
            reads = (one,) if index == 0 else (one, two)
            with b.layer(index):
                one, two = b.compute(
                    "attn",
                    lambda *x, layer=layer: (layer(x[0]), x[-1] * 2),
                    *reads,
                    outputs=("one", "two"),
                    parameters=layer.parameters(),
                )
        (loss,) = b.compute("head", lambda a, b: (a + b).sum(), one, two, outputs=("loss",))
        b.loss(loss)
        return b.build()


def test_layers_that_hand_on_more_than_one_value_are_refused() -> None:
    chunk = ModelChunk(Sideways(), recompute=U(1))
    with pytest.raises(ProgramError, match=r"layer 0 reads .* and hands on .*: the contiguous path takes one each"):
        contiguous_step(chunk, [{"x": torch.randn(3, 4)}])


@pytest.mark.parametrize("step", [contiguous_step, reference_step, train_step])
def test_a_step_leaves_no_tensor_behind(step: Any) -> None:
    """Row 54's kind: with garbage collection off, a graph that holds its own results would stay."""
    chunk = make(U(1), dropout=0.1)
    data = batches(steps=4)
    step(chunk, data[0])
    gc.collect()
    gc.disable()
    # what is there already is not counted, and not walked three times
    gc.freeze()
    try:
        counts = []
        for microbatches in data[1:]:
            step(chunk, microbatches)
            counts.append(sum(issubclass(type(item), Tensor) for item in gc.get_objects()))
    finally:
        gc.unfreeze()
        gc.enable()
    assert counts[0] == counts[1] == counts[2]


class Counted(nn.Module):
    """Effects before, inside and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def note(self, place: int, value: Tensor) -> None:
        self.get_buffer("seen")[place] += value

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, torch.ones(())

    def plain(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1.0, torch.ones(())

    def program(self) -> Program:
        b = ProgramBuilder()
        x = b.input("x", needs_grad=True)
        notes = [[("one", partial(self.note, place))] for place in range(3)]
        x, _ = b.compute("first", self.plain, x, outputs=("x0",), nondiff=("one",), effects=notes[0])
        with b.layer(0):
            x, _ = b.compute(
                "mix", self.step, x, outputs=("x",), nondiff=("one",), effects=notes[1], parameters=(self.weight,)
            )
        y, _ = b.compute("last", self.plain, x, outputs=("y",), nondiff=("two",), effects=[("two", notes[2][0][1])])
        (loss,) = b.compute("loss", torch.sum, y, outputs=("loss",))
        b.loss(loss)
        return b.build()


@pytest.mark.parametrize("step", [contiguous_step, reference_step, train_step])
def test_effects_count_wherever_the_stage_stands(step: Any) -> None:
    """Row 12's kind: once per microbatch, also before the first layer."""
    module = Counted()
    chunk = ModelChunk(module, recompute=U(1), order="plain")
    step(chunk, [{"x": torch.ones(3, requires_grad=True)} for _ in range(2)])
    assert module.get_buffer("seen").tolist() == [2.0, 2.0, 2.0]
