"""Trainer: one step is forward, backward, clip, AdamW, expert bias, once each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, PerMicrobatch, PerToken, train_step
from overlap.model import Decoder, ModelConfig, update_expert_bias
from overlap.training.trainer import Trainer
from recompute import ConfigError, RecomputeConfig


def make(**changes: Any) -> ModelChunk:
    config = ModelConfig(**{"layers": 2, "hidden": 16, "vocab": 32, **changes})
    scale = PerToken() if config.per_token_loss else PerMicrobatch()
    return ModelChunk(Decoder(config), recompute=RecomputeConfig.uniform(1), loss_scale=scale)


def feeds(step: int) -> list[dict[str, Tensor]]:
    drawn = torch.randint(32, (2, 2, 2, 8), generator=torch.Generator().manual_seed(step))
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


def test_a_step_by_hand() -> None:
    chunk, plain = make(), make()
    trainer = Trainer(chunk, feeds, learning_rate=1e-2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(3):
        report = trainer.step()
        losses = [mb["loss"].double() for mb in train_step(plain, feeds(number))]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_expert_bias(plain)
        assert report.step == number
        assert report.loss == float(torch.stack(losses).sum()) / 2
        assert report.milliseconds > 0
        assert report.tokens_per_second == pytest.approx(2 * 2 * 8 / report.milliseconds * 1e3)
    for left, right in zip(chunk.state_dict().values(), plain.state_dict().values(), strict=True):
        assert left == right if isinstance(left, dict) else torch.equal(left, right)
    assert all(p.grad is None for p in chunk.parameters())


def test_loss_per_token_is_the_mean_over_tokens() -> None:
    """The same model and data report the same loss, up to rounding, however losses are summed."""
    mean = Trainer(make(), feeds).step().loss
    summed = Trainer(make(per_token_loss=True), feeds, per_token=True).step().loss
    assert summed == pytest.approx(mean, rel=1e-6)
    for chunk, per_token in ((make(per_token_loss=True), False), (make(), True)):
        with pytest.raises(ConfigError, match=f"per_token={per_token}: the model's losses are"):
            Trainer(chunk, feeds, per_token=per_token)


def test_the_loss_falls_on_data_that_repeats() -> None:
    trainer = Trainer(make(), lambda _: feeds(0), learning_rate=1e-2)
    reports = [trainer.step() for _ in range(15)]
    assert reports[-1].loss < reports[0].loss - 0.5
    router = trainer.chunk.get_submodule("module.layers.0.router")
    assert torch.as_tensor(router.expert_bias).ne(0).any()
    assert int(torch.as_tensor(router.tokens_per_expert).sum()) == 0


BAD: list[dict[str, Any]] = [
    {"learning_rate": "3e-3"}, {"learning_rate": 0}, {"learning_rate": float("nan")}, {"per_token": None},
    {"graph": "no"}, {"chunk": None},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_arguments(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=f"^{name}=.*: must be "):
        Trainer(**{"chunk": make(), "data": feeds, **bad})
