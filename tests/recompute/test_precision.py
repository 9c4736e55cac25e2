"""The precision context of a forward is entered again by its replay, whoever calls backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, ProgramBuilder, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.model import Decoder, ModelConfig
from overlap.verify import compare
from recompute import ConfigError, RecomputeConfig
from recompute.checkpoint import PlainLayer, checkpoint_layers
from recompute.precision import capture_precision, no_autocast

# torch says once per process that rms_norm has no fused kernel for mixed types.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
RULES = [RecomputeConfig.uniform(1), RecomputeConfig.uniform(2), RecomputeConfig.block(1)]
bf16 = torch.bfloat16


def test_capture() -> None:
    assert capture_precision("cpu") is None
    with torch.autocast("cpu", bf16):
        precision = capture_precision("cpu")
        with no_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            assert capture_precision("cpu") is None
        assert torch.is_autocast_enabled("cpu")
    assert precision is not None
    for _ in range(2):
        with precision():
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is bf16
            assert not torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_enabled("cpu")


class Block(nn.Module):
    """A layer that logs the type of its intermediates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.dtypes: list[tuple[torch.dtype, torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        output: Tensor = self.second(hidden)
        self.dtypes.append((hidden.dtype, output.dtype, torch.is_grad_enabled()))
        return x + output


def autocast_run(rule: RecomputeConfig, *, inside: bool = False) -> tuple[list[Tensor | None], list[Block]]:
    """Forward inside autocast, backward outside (or inside); gradients and blocks."""
    torch.manual_seed(0)
    blocks = [Block(8) for _ in range(3)]
    x = torch.randn(4, 8)
    with torch.autocast("cpu", bf16):
        output, _ = checkpoint_layers([PlainLayer(module=b) for b in blocks], x, rule)
        loss = output.float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    return [p.grad for b in blocks for p in b.parameters()], blocks


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_backward_called_outside(rule: RecomputeConfig, inside: bool) -> None:
    """Row 8: every intermediate of the replay has its first-pass type, gradients are plain autograd's."""
    expected, _ = autocast_run(RecomputeConfig.none())
    found, blocks = autocast_run(rule, inside=inside)
    assert len(expected) == 12
    for a, b in zip(expected, found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    recomputed = blocks if rule.method == "uniform" else blocks[:1]
    for block in recomputed:
        assert block.dtypes == [(bf16, bf16, False), (bf16, bf16, True)]


def test_without_autocast_the_numbers_are_others() -> None:
    """Row 8: negative control: autocast changes gradients, so the equality above says something."""
    torch.manual_seed(0)
    blocks = [Block(8) for _ in range(3)]
    output = nn.Sequential(*blocks)(torch.randn(4, 8))
    output.square().sum().backward()
    expected, _ = autocast_run(RecomputeConfig.none())
    wide = [p.grad for b in blocks for p in b.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(expected, wide, strict=True) if a is not None and b is not None)


def test_autocast_switched_on_after_the_forward_does_not_reach_the_replay() -> None:
    """Row 8: the other way round: a float32 forward whose backward is called inside autocast."""
    torch.manual_seed(0)
    block = Block(8)
    output, _ = checkpoint_layers([PlainLayer(module=block)], torch.randn(4, 8), RecomputeConfig.uniform(1))
    with torch.autocast("cpu", bf16):
        output.square().sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert block.dtypes == [(torch.float32, torch.float32, False), (torch.float32, torch.float32, True)]


def small(rule: RecomputeConfig, *, delay_wgrad: bool = False, **changes: Any) -> ModelChunk:
    config = ModelConfig(layers=3, hidden=16, vocab=32, dropout=0.1, **changes)
    return ModelChunk(Decoder(config), recompute=rule, delay_wgrad=delay_wgrad)


def feeds() -> list[dict[str, Tensor]]:
    drawn = torch.randint(32, (2, 2, 2, 8), generator=torch.Generator().manual_seed(0))
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


def gradients(chunk: ModelChunk, step: Any, *, autocast: bool = True) -> dict[str, Tensor | None]:
    chunk = copy.deepcopy(chunk)
    with torch.autocast("cpu", bf16, enabled=autocast):
        losses = step(chunk, feeds())
        assert torch.is_autocast_enabled("cpu") == autocast
    found: dict[str, Tensor | None] = {f"{n}.{k}": v for n, mb in enumerate(losses) for k, v in mb.items()}
    found.update((name, p.grad) for name, p in chunk.named_parameters())
    found.update((name, b.clone()) for name, b in chunk.named_buffers())
    return found


@pytest.mark.parametrize("delay_wgrad", [False, True])
@pytest.mark.parametrize("rule", [*RULES, RecomputeConfig.none()], ids=str)
def test_train_step_under_autocast(rule: RecomputeConfig, delay_wgrad: bool) -> None:
    """Row 8: a step under ambient autocast equals the reference under the same; without it the numbers differ."""
    chunk = small(rule, delay_wgrad=delay_wgrad)
    expected = gradients(chunk, reference_step)
    assert compare(expected, gradients(chunk, train_step)).different == ()
    assert compare(expected, gradients(chunk, contiguous_step)).different == ()
    assert compare(expected, gradients(chunk, train_step, autocast=False)).different != ()


class Typed(nn.Module):
    """A program that logs the types of its products in first pass and replay."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)

    def program(self) -> Any:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        with b.layer(0):
            (hidden,) = b.compute("attn", self.block, hidden, outputs=("hidden",), parameters=self.block.parameters())
        (loss,) = b.compute("head", lambda x: x.float().square().sum(), hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()


def test_types_under_train_step() -> None:
    """Row 8: first pass and replay of the scheduler-driven path compute in the same types."""
    chunk = ModelChunk(Typed(), recompute=RecomputeConfig.uniform(1))
    chunk.checked = True
    with torch.autocast("cpu", bf16):
        train_step(chunk, [{"hidden": torch.randn(4, 8)}])
    assert chunk.module.block.dtypes == [(bf16, bf16, False), (bf16, bf16, True)]  # type: ignore[union-attr]


def test_float16_autocast_is_refused() -> None:
    chunk = small(RecomputeConfig.none())
    with torch.autocast("cpu", torch.float16), pytest.raises(ConfigError, match=r"autocast dtype=torch\.float16"):
        train_step(chunk, feeds())
