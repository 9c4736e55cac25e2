"""Snapshots of buffers that a stage changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recompute import RecomputeConfig, state
from recompute.checkpoint import PlainLayer, checkpoint_layers


def test_a_snapshot_is_a_copy() -> None:
    buffers = (torch.zeros(3), torch.tensor(5))
    snapshot = state.take(buffers)
    buffers[0].add_(1)
    buffers[1].add_(1)
    assert snapshot[0].tolist() == [0.0] * 3
    assert snapshot[1].item() == 5
    state.put(buffers, snapshot)
    assert buffers[0].tolist() == [0.0] * 3
    assert buffers[1].item() == 5


def test_as_of_shows_the_past_and_forgets_what_is_written() -> None:
    (buffer,) = buffers = (torch.zeros(3),)
    snapshot = state.take(buffers)
    buffer.fill_(7)
    with state.as_of(buffers, snapshot):
        assert buffer.tolist() == [0.0] * 3
        buffer.add_(1)
    assert buffer.tolist() == [7.0] * 3
    assert snapshot[0].tolist() == [0.0] * 3


def test_as_of_restores_after_an_exception() -> None:
    (buffer,) = buffers = (torch.ones(3),)
    snapshot = (torch.zeros(3),)
    with pytest.raises(ValueError, match="inside"), state.as_of(buffers, snapshot):
        raise ValueError("inside")
    assert buffer.tolist() == [1.0] * 3


def test_a_graph_that_saved_the_buffer_is_not_upset() -> None:
    """Putting values back is no change behind the graph's back; a plain in-place change is."""
    weight, buffer = nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    loss = (weight * buffer).sum()
    state.put((buffer,), (torch.full((3,), 2.0),))
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3
    loss = (weight * buffer).sum()
    buffer.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class ScaledLinear(nn.Module):
    """A product whose scale follows the largest input seen, as low-precision formats keep it."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("scale", torch.ones(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.clone()
        self.seen.append(scale)
        result = torch.tanh(x / scale @ self.weight) * scale
        with torch.no_grad():
            self.scale.copy_(0.9 * self.scale + 0.1 * x.abs().max())
        return result


def scaled_run(rule: RecomputeConfig, *, declared: bool) -> tuple[list[Tensor], list[Any]]:
    """Three microbatches, forwards first; gradients and final scales, and the scales that each layer saw."""
    torch.manual_seed(0)
    modules = [ScaledLinear(8) for _ in range(3)]
    layers = [PlainLayer(module=m, state=(m.scale,) if declared else ()) for m in modules]
    outputs = [checkpoint_layers(layers, torch.randn(4, 8), rule)[0] for _ in range(3)]
    for output in outputs:
        output.square().sum().backward()
    gradients = [m.weight.grad for m in modules if m.weight.grad is not None]
    return [*gradients, *(m.scale for m in modules)], [m.seen for m in modules]


@pytest.mark.parametrize("rule", [RecomputeConfig.uniform(1), RecomputeConfig.uniform(2)], ids=str)
def test_a_scale_that_moves_with_every_forward(rule: RecomputeConfig) -> None:
    """Row 6: the replay of microbatch i sees the scale of its first pass, though i+1 and i+2 have moved it on."""
    expected, _ = scaled_run(RecomputeConfig.none(), declared=True)
    found, seen = scaled_run(rule, declared=True)
    assert len(expected) == 6
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for scales in seen:
        assert len(scales) == 6
        assert torch.equal(torch.stack(scales[:3]), torch.stack(scales[3:]))
        assert len({float(scale) for scale in scales[:3]}) == 3
    broken, _ = scaled_run(rule, declared=False)
    assert not any(torch.equal(a, b) for a, b in zip(expected, broken, strict=True)), "undeclared state goes wrong"
