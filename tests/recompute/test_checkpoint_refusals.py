"""checkpoint_layers(): what it cannot give is refused, not computed wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recompute import ConfigError, RecomputeConfig, RecomputeError
from recompute.checkpoint import Draws, PlainLayer, checkpoint_layers
from tests.recompute.test_checkpoint import LAYERS, NONE, RULES, WIDTH, Block, gradients_of


@pytest.mark.parametrize("rule", [NONE, *RULES], ids=str)
def test_layers_that_draw_need_draws(rule: RecomputeConfig) -> None:
    """Row 1: defaults would be the same mask in every call, whatever the step and the generators."""
    layers = [PlainLayer(module=nn.Identity()), PlainLayer(module=nn.Dropout(0.5), draws_rng=True)]
    with pytest.raises(ConfigError, match=r"draws=None: layer 1 draws: give Draws\(run_seed=, step=, microbatch=\)"):
        checkpoint_layers(layers, torch.ones(1, 16), rule)
    masks = [checkpoint_layers(layers, torch.ones(1, 16), rule, draws=Draws(step=n))[0] for n in (0, 1, 0)]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_of_some_tensors_are_refused(rule: RecomputeConfig) -> None:
    """The replay's backward fills `.grad`; as torch's reentrant checkpoint, it says so and leaves `.grad` alone."""
    for trains in (True, False):
        blocks = [Block().requires_grad_(trains) for _ in range(LAYERS)]
        x = torch.randn(6, WIDTH, requires_grad=True)

        def loss(config: RecomputeConfig, blocks: list[Block] = blocks, x: Tensor = x) -> Tensor:
            return checkpoint_layers([PlainLayer(module=b) for b in blocks], x, config)[0].square().sum()

        (expected,) = torch.autograd.grad(loss(NONE), x)
        if trains:
            with pytest.raises(RecomputeError, match=r"torch.autograd.grad\(\) and backward\(inputs=...\) do not go"):
                torch.autograd.grad(loss(rule), x)
            with pytest.raises(RecomputeError, match="do not go with recomputed layers"):
                loss(rule).backward(inputs=[x])
        else:
            assert torch.equal(torch.autograd.grad(loss(rule), x)[0], expected), "there is nothing to fill"
        assert x.grad is None
        assert all(gradient is None for gradient in gradients_of(blocks).values())
