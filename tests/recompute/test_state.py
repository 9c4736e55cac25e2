"""Snapshots of buffers that a stage changes in place."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recompute import RecomputeConfig, RecomputeError, state
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


def test_a_graph_saves_copies_of_the_buffers_and_of_their_views() -> None:
    weight, buffer = nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    for context in (state.saving_copies((buffer,)), state.as_of((buffer,), (torch.full((3,), 2.0),))):
        weight.grad = None
        buffer.fill_(2.0)
        with context:
            loss = (weight * buffer).sum() + (weight[:1] * buffer[1:2]).sum()
        buffer.data.add_(5)
        buffer.add_(1)
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [4.0, 2.0, 2.0]


def test_copies_go_through_the_hooks_that_were_there() -> None:
    weight, buffer = nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    with saved_tensors_hooks(pack, packed.__getitem__), state.saving_copies((buffer,)):
        loss = (weight * buffer).square().sum()
    assert not any(tensor.data_ptr() == buffer.data_ptr() for tensor in packed)
    assert any(torch.equal(tensor, buffer) for tensor in packed)
    buffer.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0] * 3


def test_other_tensors_that_were_saved_must_stay_as_they_are() -> None:
    """Autograd does not look behind hooks, so these look themselves."""
    weight, buffer, other = nn.Parameter(torch.ones(3)), torch.ones(3), torch.ones(3)
    with state.saving_copies((buffer,)):
        loss = (weight * other).sum()
    other.add_(1)
    with pytest.raises(
        RecomputeError, match=r"shape \(3,\) that a stage saved for its backward has been changed in place"
    ):
        loss.backward()


def test_a_graph_that_saves_a_result_does_not_hold_itself() -> None:
    weight, buffer = nn.Parameter(torch.ones(3)), torch.ones(3)
    gc.disable()
    try:
        with state.saving_copies((buffer,)):
            result = torch.exp(weight * buffer)
        alive = weakref.ref(result.untyped_storage())
        del result
        assert alive() is None
    finally:
        gc.enable()


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


class Scaled(nn.Module):
    """A product whose graph saves the scale itself, right after it moved."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.scale.mul_(0.5).add_(y.detach().abs().mean(0))
        result: Tensor = y * self.scale
        return result


def saving_run(rule: RecomputeConfig | None) -> list[Tensor]:
    """Gradients and scales of three microbatches, all forwards first; None: plain autograd, one after another."""
    torch.manual_seed(0)
    modules = [Scaled(8) for _ in range(2)]
    inputs = [torch.randn(4, 8) for _ in range(3)]
    if rule is None:
        for x in inputs:
            modules[1](modules[0](x)).sum().backward()
    else:
        layers = [PlainLayer(module=m, state=(m.scale,)) for m in modules]
        for output in [checkpoint_layers(layers, x, rule)[0] for x in inputs]:
            output.sum().backward()
    gradients = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    return [*gradients, *(m.scale for m in modules)]


@pytest.mark.parametrize(
    "rule", [RecomputeConfig.none(), RecomputeConfig.uniform(1), RecomputeConfig.uniform(2)], ids=str
)
def test_a_scale_that_the_graph_saves(rule: RecomputeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = saving_run(None), saving_run(rule)
    assert len(expected) == 6
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    monkeypatch.setattr(state, "saving_copies", lambda buffers: nullcontext())
    if rule == RecomputeConfig.none():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saving_run(rule)
    else:
        assert not all(torch.equal(a, b) for a, b in zip(expected, saving_run(rule), strict=True))
