"""Queries, keys and values of latent attention by kernels of our own: one for queries, one for keys and values.

Legend: B sequences, S positions, H heads, n width without rotary, r with, v of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.model.custom import apply, apply_many
from overlap.model.fused import contiguous, kernels
from overlap.model.rope import Rotary


def turned(
    rotary: Rotary, positions: Tensor | None, queries: Tensor, expanded: Tensor, k_rope: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut into heads, rotate, give every head the shared part of the keys.

    Args:
        rotary: Tables of the rotation.
        positions: [B, S] int64, any strides; None: 0 to S-1.
        queries: [B*S, H*(n + r)].
        expanded: [B*S, H*(n + v)].
        k_rope: [B*S, r], rows contiguous.
        shape: B, S, H.

    Returns:
        Queries and keys [B, H, S, n + r], values [B, H, S, v].
    """
    positions = contiguous(positions)
    query = apply(_Queries, queries, rotary.cos, rotary.sin, positions, shape)
    plain = query.shape[-1] - k_rope.shape[-1]
    key, value = apply_many(_Keys, expanded, k_rope, rotary.cos, rotary.sin, positions, shape, plain)
    return query, key, value


def _cut(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[B*S, H*d] -> [B, S, H, d], contiguous."""
    return x.contiguous().view(*shape, x.shape[-1] // shape[-1])


def _rows(x: Tensor) -> Tensor:
    """[B, S, H, d], contiguous -> [B*S, H*d]."""
    return x.view(x.shape[0] * x.shape[1], -1)


def _turn_queries(source: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: int) -> Tensor:
    """[B, S, H, d], contiguous; the result too."""
    target = torch.empty_like(source)
    kernels("triton_latent").turn_queries(source, target, cos, sin, positions, sign)
    return target


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, shape: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        return _turn_queries(_cut(queries, shape), cos, sin, positions, 1).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin, positions = ctx.saved_tensors
        turned_back = _turn_queries(grad.transpose(1, 2).contiguous(), cos, sin, positions, -1)
        return _rows(turned_back), None, None, None, None


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        expanded: Tensor,
        rope: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        shape: Sequence[int],
        plain: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        expanded = _cut(expanded, shape)
        wide = expanded.shape[-1] - plain
        key = expanded.new_empty(*expanded.shape[:-1], plain + rope.shape[-1])
        value = expanded.new_empty(*expanded.shape[:-1], wide)
        rope = rope if rope.stride(-1) == 1 else rope.contiguous()
        kernels("triton_latent").spread_keys(expanded, rope.view(*shape[:-1], -1), key, value, cos, sin, positions)
        return key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        cos, sin, positions = ctx.saved_tensors
        grad_key, grad_value = grad_key.transpose(1, 2).contiguous(), grad_value.transpose(1, 2).contiguous()
        turned_width = 2 * cos.shape[1]
        wide, plain = grad_value.shape[-1], grad_key.shape[-1] - turned_width
        expanded = grad_key.new_empty(*grad_key.shape[:-1], plain + wide)
        rope = grad_key.new_empty(*grad_key.shape[:2], turned_width)
        kernels("triton_latent").gather_keys(grad_key, grad_value, expanded, rope, cos, sin, positions)
        return _rows(expanded), rope.view(-1, turned_width), None, None, None, None, None
