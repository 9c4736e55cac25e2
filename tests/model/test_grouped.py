"""Grouped products: weight gradients that are added, not made whole."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

from overlap import ModelChunk, train_step
from overlap.model import Decoder, GroupedExperts, ModelConfig
from overlap.model.grouped import grouped_mm_wgrad, grouped_mm_wgrad_add
from recompute import RecomputeConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "covers"), [([3, 0, 4], True), ([2, 1, 0], False)])
def test_added_has_the_bits_of_the_whole_added(counts: list[int], covers: bool, dtype: torch.dtype) -> None:
    x, grad, into = torch.randn(7, 8, dtype=dtype), torch.randn(7, 4, dtype=dtype), torch.randn(3, 8, 4, dtype=dtype)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    expected = into + grouped_mm_wgrad(x, grad, ends, covers)
    grouped_mm_wgrad_add(into, x, grad, ends, covers)
    assert torch.equal(into, expected)


def test_ends_are_checked() -> None:
    ends = torch.tensor([1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"end at \[1, 3\], for 4 rows"):
        grouped_mm_wgrad_add(torch.zeros(2, 2, 2), torch.ones(4, 2), torch.ones(4, 2), ends, True)


@pytest.mark.parametrize("delay", [False, True])
def test_a_step_makes_no_expert_gradient_whole(delay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second microbatch on, and from the first where `.grad` is there already."""
    whole = []

    def counted(*args: object) -> torch.Tensor:
        whole.append(args)
        gradient: torch.Tensor = grouped_mm_wgrad(*args)
        return gradient

    monkeypatch.setattr(import_module("overlap.model.linear"), "grouped_mm_wgrad", counted)
    config = ModelConfig(layers=2)
    chunk = ModelChunk(Decoder(config), recompute=RecomputeConfig.uniform(1), delay_wgrad=delay)
    tokens = torch.randint(config.vocab, (3, 1, 9), generator=torch.Generator().manual_seed(0))
    feeds = [{"ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]
    kept = copy.deepcopy(chunk)
    train_step(chunk, feeds)
    weights = 2 * config.layers
    assert len(whole) == weights, "the first microbatch's"
    train_step(chunk, feeds)
    assert len(whole) == weights
    experts = [module for module in kept.modules() if isinstance(module, GroupedExperts)]
    for module in experts:
        _watch(module)
    whole.clear()
    train_step(kept, feeds)
    assert len(whole) == weights * len(feeds), "hooks see them whole"


def _watch(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: None)
