"""checkpoint_layers(): how a segment stands in the graph around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recompute import RecomputeConfig
from recompute.checkpoint import LayerResult, PlainLayer, checkpoint_layers
from tests.recompute.test_checkpoint import WIDTH, Block, Routed


def test_a_gradient_of_the_input_alone_is_worth_a_replay() -> None:
    block, graphs = Block().requires_grad_(False), []
    block.register_forward_pre_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    x = torch.randn(6, WIDTH, requires_grad=True)
    hidden, _ = checkpoint_layers([PlainLayer(module=block)], x, RecomputeConfig.uniform(1))
    hidden.sum().backward()
    assert graphs == [False, True]
    assert x.grad is not None


def test_a_loss_may_be_a_parameter() -> None:
    class Scaled(Routed):
        scale = nn.Parameter(torch.tensor(2.0))

        def parameters(self) -> Sequence[nn.Parameter]:
            return (*super().parameters(), self.scale)

        def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
            return LayerResult(hidden=self.linear(hidden), losses=(self.scale,))

    layer = Scaled()
    hidden, (loss,) = checkpoint_layers([layer], torch.randn(6, WIDTH), RecomputeConfig.uniform(1))
    assert layer.scale.is_leaf, "the segment's output is another tensor"
    (hidden.sum() + 3 * loss).backward()
    assert layer.scale.grad == 3
