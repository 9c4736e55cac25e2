"""Queries, keys and values of latent attention in Triton: rotary, broadcast and concatenation in one kernel each way.

A program takes one token, all heads. Legend: T tokens, H heads, n width without rotary, r with, v of values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _query_kernel(  # type: ignore[no-untyped-def]
    source, target, cos, sin, positions, length, heads, plain, half, sign,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(positions + token) if POSITIONS else token % length
    head = tl.arange(0, HEADS)[:, None]
    width = plain + 2 * half
    base = (token * heads + head) * width
    column = tl.arange(0, PLAIN)[None, :]
    inside = (head < heads) & (column < plain)
    tl.store(target + base + column, tl.load(source + base + column, mask=inside), mask=inside)
    turn = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (turn < half)
    c = tl.load(cos + place * half + turn, mask=turn < half)
    s = tl.load(sin + place * half + turn, mask=turn < half) * sign
    first = tl.load(source + base + plain + turn, mask=inside).to(tl.float32)
    second = tl.load(source + base + plain + half + turn, mask=inside).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + base + plain + turn, (first * c - second * s).to(kind), mask=inside)
    tl.store(target + base + plain + half + turn, (second * c + first * s).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _key_kernel(  # type: ignore[no-untyped-def]
    expanded, rope, rope_stride, key, value, cos, sin, positions, length, heads, plain, half, wide,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(positions + token) if POSITIONS else token % length
    head = tl.arange(0, HEADS)[:, None]
    row = token * heads + head
    column = tl.arange(0, PLAIN)[None, :]
    inside = (head < heads) & (column < plain)
    kept = tl.load(expanded + row * (plain + wide) + column, mask=inside)
    tl.store(key + row * (plain + 2 * half) + column, kept, mask=inside)
    column = tl.arange(0, WIDE)[None, :]
    inside = (head < heads) & (column < wide)
    kept = tl.load(expanded + row * (plain + wide) + plain + column, mask=inside)
    tl.store(value + row * wide + column, kept, mask=inside)
    turn = tl.arange(0, HALF)[None, :]
    known = turn < half
    c = tl.load(cos + place * half + turn, mask=known)
    s = tl.load(sin + place * half + turn, mask=known)
    first = tl.load(rope + token * rope_stride + turn, mask=known).to(tl.float32)
    second = tl.load(rope + token * rope_stride + half + turn, mask=known).to(tl.float32)
    kind = key.dtype.element_ty
    every = tl.zeros((HEADS, HALF), tl.float32)
    target = key + row * (plain + 2 * half) + plain + turn
    inside = (head < heads) & known
    tl.store(target, (every + (first * c - second * s)).to(kind), mask=inside)
    tl.store(target + half, (every + (second * c + first * s)).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _key_backward_kernel(  # type: ignore[no-untyped-def]
    grad_key, grad_value, grad_expanded, grad_rope, cos, sin, positions, length, heads, plain, half, wide,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(positions + token) if POSITIONS else token % length
    head = tl.arange(0, HEADS)[:, None]
    row = token * heads + head
    column = tl.arange(0, PLAIN)[None, :]
    inside = (head < heads) & (column < plain)
    kept = tl.load(grad_key + row * (plain + 2 * half) + column, mask=inside)
    tl.store(grad_expanded + row * (plain + wide) + column, kept, mask=inside)
    column = tl.arange(0, WIDE)[None, :]
    inside = (head < heads) & (column < wide)
    kept = tl.load(grad_value + row * wide + column, mask=inside)
    tl.store(grad_expanded + row * (plain + wide) + plain + column, kept, mask=inside)
    turn = tl.arange(0, HALF)
    known = turn < half
    inside = (head < heads) & (turn[None, :] < half)
    source = grad_key + row * (plain + 2 * half) + plain + turn[None, :]
    # all heads read the same rotated part: their gradients add up, in float32 and in the order of the heads
    first = tl.sum(tl.load(source, mask=inside, other=0.0).to(tl.float32), 0)
    second = tl.sum(tl.load(source + half, mask=inside, other=0.0).to(tl.float32), 0)
    c = tl.load(cos + place * half + turn, mask=known)
    s = tl.load(sin + place * half + turn, mask=known)
    kind = grad_rope.dtype.element_ty
    tl.store(grad_rope + token * 2 * half + turn, (first * c + second * s).to(kind), mask=known)
    tl.store(grad_rope + token * 2 * half + half + turn, (second * c - first * s).to(kind), mask=known)


def turn_queries(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: int) -> None:
    """Copy queries (or gradients of queries), their last 2*half columns rotated.

    Args:
        source: [B, S, H, n + r] contiguous.
        target: As `source`.
        cos: [positions, r/2] float32.
        sin: As `cos`.
        positions: [B, S] int64; None: 0 to S-1.
        sign: 1 forward, -1 backward.
    """
    _, length, heads, width = source.shape
    half = cos.shape[1]
    plain = width - 2 * half
    places = source if positions is None else positions
    _query_kernel[(source.shape[0] * length,)](
        source, target, cos, sin, places, length, heads, plain, half, sign,
        *_blocks(heads, plain, half), positions is not None,
    )  # fmt: skip


def spread_keys(
    expanded: Tensor, rope: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> None:
    """Write keys and values.

    Args:
        expanded: [B, S, H, n + v] contiguous: the heads' own part of keys, and values.
        rope: [B, S, r], rows contiguous: the part that all heads share, not yet rotated.
        key: [B, S, H, n + r] contiguous, written.
        value: [B, S, H, v] contiguous, written.
        cos: [positions, r/2] float32.
        sin: As `cos`.
        positions: As for turn_queries.
    """
    batch, length, heads, wide = value.shape
    half = cos.shape[1]
    plain = expanded.shape[-1] - wide
    places = expanded if positions is None else positions
    _key_kernel[(batch * length,)](
        expanded, rope, rope.stride(1), key, value, cos, sin, places, length, heads, plain, half, wide,
        *_blocks(heads, plain, half), triton.next_power_of_2(wide), positions is not None,
    )  # fmt: skip


def gather_keys(
    grad_key: Tensor, grad_value: Tensor, grad_expanded: Tensor, grad_rope: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None,
) -> None:  # fmt: skip
    """Gradients of spread_keys' `expanded` and `rope`; all contiguous, shaped as its arguments."""
    batch, length, heads, wide = grad_value.shape
    half = cos.shape[1]
    plain = grad_expanded.shape[-1] - wide
    places = grad_key if positions is None else positions
    _key_backward_kernel[(batch * length,)](
        grad_key, grad_value, grad_expanded, grad_rope, cos, sin, places, length, heads, plain, half, wide,
        *_blocks(heads, plain, half), triton.next_power_of_2(wide), positions is not None,
    )  # fmt: skip


def _blocks(heads: int, plain: int, half: int) -> tuple[int, int, int]:
    return triton.next_power_of_2(heads), triton.next_power_of_2(plain), triton.next_power_of_2(half)
