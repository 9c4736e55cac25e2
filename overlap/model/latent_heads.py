"""Queries, keys and values of latent attention by kernels of our own: one for queries, one for keys and values.

Legend: B sequences, S positions, H heads, n width without rotary, r with, v of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.model.custom import apply
from overlap.model.fused import kernels
from overlap.model.rope import Rotary


def turned(
    rotary: Rotary, positions: Tensor | None, queries: Tensor, expanded: Tensor, k_rope: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut into heads, rotate, give every head the shared part of the keys.

    Args:
        rotary: Tables of the rotation.
        positions: [B, S] int64; None: 0 to S-1.
        queries: [B, S, H*(n + r)].
        expanded: [B, S, H*(n + v)].
        k_rope: [B, S, r].
        heads: H.

    Returns:
        Queries and keys [B, H, S, n + r], values [B, H, S, v].
    """
    query = apply(_Queries, _cut(queries, heads), rotary.cos, rotary.sin, positions)
    plain = query.shape[-1] - k_rope.shape[-1]
    key, value = apply(_Keys, _cut(expanded, heads), k_rope, rotary.cos, rotary.sin, positions, plain)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _cut(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        source = source.contiguous()
        target = torch.empty_like(source)
        kernels("triton_latent").turn_queries(source, target, cos, sin, positions, 1)
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, positions = ctx.saved_tensors
        grad = grad.contiguous()
        target = torch.empty_like(grad)
        kernels("triton_latent").turn_queries(grad, target, cos, sin, positions, -1)
        return target, None, None, None


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, expanded: Tensor, rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, plain: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        wide = expanded.shape[-1] - plain
        key = expanded.new_empty(*expanded.shape[:-1], plain + rope.shape[-1])
        value = expanded.new_empty(*expanded.shape[:-1], wide)
        rope = rope if rope.stride(-1) == 1 and rope.stride(0) == rope.shape[1] * rope.stride(1) else rope.contiguous()
        kernels("triton_latent").spread_keys(expanded.contiguous(), rope, key, value, cos, sin, positions)
        return key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        cos, sin, positions = ctx.saved_tensors
        turned_width = 2 * cos.shape[1]
        wide, plain = grad_value.shape[-1], grad_key.shape[-1] - turned_width
        expanded = grad_key.new_empty(*grad_key.shape[:-1], plain + wide)
        rope = grad_key.new_empty(*grad_key.shape[:2], turned_width)
        kernels("triton_latent").gather_keys(
            grad_key.contiguous(), grad_value.contiguous(), expanded, rope, cos, sin, positions
        )
        return expanded, rope, None, None, None, None
