"""Latent attention's heads around their kernels: layouts and gradients, with torch operations in place of kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from overlap.model import ModelConfig
from overlap.model.attention import LatentAttention
from overlap.model.latent_heads import turned
from overlap.model.rope import Rotary

HEADS, NOPE, ROPE, VALUE = 3, 6, 4, 5
CONFIG = ModelConfig(
    hidden=8, heads=HEADS, kv_rank=8, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE, max_seq=16, dtype="float64"
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: int) -> Tensor:
    """[B, S, H, r]."""
    assert x.is_contiguous() or x.shape[-1] == ROPE
    tables = [t[: x.shape[1]].view(1, -1, 1, ROPE // 2) if positions is None else t[positions].unsqueeze(2)
              for t in (cos, sin)]  # fmt: skip
    first, second = x.chunk(2, -1)
    return torch.cat((first * tables[0] - sign * second * tables[1], second * tables[0] + sign * first * tables[1]), -1)


def turn_queries(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: int) -> None:
    read(positions)
    assert source.is_contiguous()
    assert target.is_contiguous()
    target[..., :NOPE] = source[..., :NOPE]
    target[..., NOPE:] = rotate(source[..., NOPE:], cos, sin, positions, sign)


def spread_keys(
    expanded: Tensor, rope: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> None:
    read(positions)
    assert all(x.is_contiguous() for x in (expanded, key, value))
    key[..., :NOPE] = expanded[..., :NOPE]
    key[..., NOPE:] = rotate(rope.unsqueeze(2), cos, sin, positions, 1)
    value.copy_(expanded[..., NOPE:])


def gather_keys(
    grad_key: Tensor, grad_value: Tensor, grad_expanded: Tensor, grad_rope: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor | None,
) -> None:  # fmt: skip
    read(positions)
    assert all(x.is_contiguous() for x in (grad_key, grad_value, grad_expanded, grad_rope))
    grad_expanded[..., :NOPE] = grad_key[..., :NOPE]
    grad_expanded[..., NOPE:] = grad_value
    grad_rope.copy_(rotate(grad_key[..., NOPE:].sum(2, keepdim=True), cos, sin, positions, -1).squeeze(2))


def read(positions: Tensor | None) -> None:
    """Kernels take positions without strides."""
    assert positions is None or positions.is_contiguous()


POSITIONS = {
    "none": None,
    "packed": torch.randint(16, (2, 7)),
    "the same in every row": torch.arange(7).expand(2, 7),
    "part of a longer row": torch.arange(16).view(2, 8)[:, :-1],
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_heads_are_those_without_the_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(turn_queries=turn_queries, spread_keys=spread_keys, gather_keys=gather_keys)
    monkeypatch.setattr("overlap.model.latent_heads.kernels", lambda name: kernel)
    rotary = Rotary(CONFIG)
    attention = LatentAttention(CONFIG, rotary)
    leaves = [
        torch.randn(14, width, dtype=torch.float64, requires_grad=True)
        for width in (HEADS * (NOPE + ROPE), HEADS * (NOPE + VALUE), 8 + ROPE)
    ]
    queries, expanded, latent = leaves
    results = []
    for make in (turned, attention._turned):
        outputs = make(rotary, POSITIONS[kind], queries, expanded, latent[..., 8:], (2, 7, HEADS))
        assert [tuple(out.shape) for out in outputs] == [(2, HEADS, 7, d) for d in (NOPE + ROPE, NOPE + ROPE, VALUE)]
        grads = [torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out) for out in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
