"""Factors on the losses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlap import ModelChunk, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.model import Decoder, ModelConfig
from overlap.parallel.scale import PerTokenOfRanks
from overlap.parallel.world import SOLO
from overlap.scale import PerMicrobatch, PerToken, check_scale
from recompute import ConfigError

LABELS = [{"labels": torch.tensor([1, 2, -100])}, {"labels": torch.tensor([-100, 4, 5])}]


@pytest.mark.parametrize(("count", "accumulate", "factor"), [(1, 1, 1.0), (4, 1, 0.25), (2, 2, 0.25), (3, 5, 1 / 15)])
def test_per_microbatch(count: int, accumulate: int, factor: float) -> None:
    """Row 57: one over the microbatches of all calls."""
    assert PerMicrobatch().factor([{}] * count, accumulate, None) == factor


def test_per_microbatch_takes_no_token_count() -> None:
    with pytest.raises(ConfigError, match="total_tokens=8: only a per-token loss scale takes it"):
        PerMicrobatch().factor([{}], 1, 8)


def test_per_token_counts_labels() -> None:
    assert PerToken().factor(LABELS, 1, None) == 0.25
    assert PerToken(ignore_index=5).factor(LABELS, 1, None) == 0.2


def test_a_step_without_tokens_has_a_finite_scale() -> None:
    assert PerToken().factor([{"labels": torch.tensor([-100])}], 1, None) == 1.0
    assert PerToken().factor(LABELS, 1, 0) == 1.0


def test_several_calls_need_the_total() -> None:
    with pytest.raises(ConfigError, match="total_tokens=None: a per-token loss over several train_step calls"):
        PerToken().factor(LABELS, 2, None)
    assert PerToken().factor(LABELS, 2, 10) == 0.1


@pytest.mark.parametrize("tokens", [-1, True, 2.0, "8"])
def test_a_token_count_is_an_integer(tokens) -> None:
    with pytest.raises(ConfigError, match=r"total_tokens=.*: must be an integer of at least 0"):
        PerToken().factor(LABELS, 1, tokens)


def test_labels_name_a_feed() -> None:
    with pytest.raises(
        ConfigError, match=r"labels='target': must name a feed that holds the labels: one of \['labels'\]"
    ):
        PerToken(labels="target").factor(LABELS, 1, None)


class Reads(TorchDispatchMode):
    """Counts what reads a number on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_tokens_are_read_once_per_step() -> None:
    """Each read waits for the device."""
    with Reads() as reads:
        assert PerToken().factor(LABELS * 3, 1, None) == 1 / 12
    assert reads.count == 1


@dataclass(frozen=True)
class Says:
    """A model, or a scale, that says which losses it has, or takes."""

    per_token: bool

    @property
    def per_token_loss(self) -> bool:
        return self.per_token

    def factor(self, *_: object) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("scale", "per_token"),
    [
        (PerMicrobatch(), False),
        (PerToken(), True),
        (PerTokenOfRanks(SOLO), True),
        (Says(False), False),
        (Says(True), True),
    ],
    ids=repr,
)
def test_a_scale_for_other_losses_is_refused(scale: Any, per_token: bool) -> None:
    assert scale.per_token == per_token
    check_scale(Says(scale.per_token), scale)
    with pytest.raises(ConfigError, match=re.escape(f"loss_scale={scale!r}: the model's losses are ")) as raised:
        check_scale(Says(not scale.per_token), scale)
    other, losses = ("PerMicrobatch", "means") if scale.per_token else ("PerToken", "sums over tokens")
    assert losses in raised.value.rule
    assert raised.value.rule.endswith(f"take {other}")


def test_who_does_not_say_is_not_checked() -> None:
    class Plain:
        def factor(self, *_: object) -> float:
            return 1.0

    for model in (Says(True), Says(False), object()):
        check_scale(model, Plain())
    for scale in (PerToken(), PerMicrobatch()):
        check_scale(object(), scale)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("step", [train_step, reference_step, contiguous_step])
def test_every_step_checks_the_scale(step: Any, per_token: bool) -> None:
    feeds = [{"ids": torch.ones(1, 4, dtype=torch.int64), "labels": torch.ones(1, 4, dtype=torch.int64)}]
    model = Decoder(ModelConfig(layers=1, per_token_loss=per_token))
    chunk = ModelChunk(model, loss_scale=PerMicrobatch() if per_token else PerToken())
    with pytest.raises(ConfigError, match="loss_scale"):
        step(chunk, feeds)
    assert all(parameter.grad is None for parameter in chunk.parameters())
    chunk.loss_scale = PerToken() if per_token else PerMicrobatch()
    step(chunk, feeds)


@pytest.mark.parametrize(
    "settings", [{"labels": None}, {"labels": ["labels"]}, {"ignore_index": None}, {"ignore_index": 1.0}]
)
def test_settings_of_a_scale(settings: Any) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name}=.*: must be "):
        PerToken(**settings)
