"""Causal self-attention: multi-head latent (DeepSeek-V2, 2024, section 2.1) and grouped-query (Ainslie et al., 2023).

Legend: B sequences, S positions, C hidden, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.model.config import Attention, ModelConfig
from overlap.model.fused import fused
from overlap.model.latent_heads import turned
from overlap.model.linear import Linear, LinearPair
from overlap.model.norm import NormThenLinear, RMSNorm
from overlap.model.rope import Rotary
from overlap.model.sequences import Sequences
from recompute.inner import rebuild, rebuilds
from recompute.modules import RecomputeModule

PLAIN = Sequences()
"""Full sequences, positions from 0."""


class CoreAttention(nn.Module):
    """Softmax attention itself; a backend may put its own in this place."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None) -> Tensor:
        """Attention over [B, H, S, d], causal or as `mask` [B, 1, S, S] allows; returns [B, S, H*d].

        Key and value may have fewer heads.
        """
        shared_heads = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=shared_heads
        )
        return mixed.transpose(1, 2).flatten(-2)


class LatentAttention(nn.Module):
    """Keys and values come from one latent of `kv_rank`.

    Position enters through `rope_dim` extra key dimensions that all heads share.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.rotary = rotary
        query_width = config.heads * (config.nope_dim + config.rope_dim)
        self.query = (
            nn.Sequential(
                Linear(config.hidden, config.q_rank),
                RMSNorm(config.q_rank, config.norm_eps),
                Linear(config.q_rank, query_width),
            )
            if config.q_rank
            else Linear(config.hidden, query_width)
        )
        self.latent = Linear(config.hidden, config.kv_rank + config.rope_dim)
        self.latent_norm = RMSNorm(config.kv_rank, config.norm_eps)
        self.key_value = Linear(config.kv_rank, config.heads * (config.nope_dim + config.value_dim))
        self.both = LinearPair()
        self.normed = NormThenLinear()
        self.core = CoreAttention()
        self.output = Linear(config.heads * config.value_dim, config.hidden)

    def forward(self, x: Tensor, sequences: Sequences = PLAIN) -> Tensor:
        """[B, S, C] -> [B, S, C]; `sequences` say who may attend to whom."""
        config = self.config
        # Five products follow, each of which would make views of its own, forward and backward.
        rows = x.flatten(0, -2)
        query, key, value = rebuild(
            RecomputeModule.MLA_UP_PROJ, self._up, *self._down(rows), sequences.positions, x.shape[:-1]
        )
        drop = config.attention_dropout if self.training else 0.0
        mixed = _attend(self.core, query, key, value, drop, sequences.mask(x))
        result: Tensor = self.output(mixed.flatten(0, -2)).view(x.shape)
        return result

    def _down(self, rows: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """What makes queries, and the two it and the latent's norm start from: results of what reads [B*S, C].

        Nobody but the caller of _up() may hold the results: the core attention would run beside them.
        """
        if isinstance(self.query, nn.Sequential):
            down, latent = self.both(self.query[0], self.latent, rows)
            return partial(self.normed, self.query[1], self.query[2]), down, latent
        if rebuilds(RecomputeModule.MLA_UP_PROJ):
            # One full matrix, whose result is rebuilt too: its input is kept for its gradient anyway.
            return self.query, rows, self.latent(rows)
        latent, queries = self.both(self.latent, self.query, rows)
        return _itself, queries, latent

    def _up(
        self,
        make_queries: Callable[[Tensor], Tensor],
        down: Tensor,
        latent: Tensor,
        positions: Tensor | None,
        shape: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From what _down() gives, [B*S, ...], to query, key and value [B, H, S, d]; `shape` is B, S."""
        config = self.config
        queries = make_queries(down)
        latent, k_rope = _split(latent, config.rope_dim)
        # once for both passes of the norm, whose kernels want whole rows
        expanded = self.normed(self.latent_norm, self.key_value, latent.contiguous())
        make = turned if fused(queries) else self._turned
        return make(self.rotary, positions, queries, expanded, k_rope, (*shape, config.heads))

    def _turned(
        self,
        rotary: Rotary,
        positions: Tensor | None,
        queries: Tensor,
        expanded: Tensor,
        k_rope: Tensor,
        shape: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """latent_heads.turned(), of torch's own operations."""
        config = self.config
        batch, length, heads = shape
        queries, expanded, k_rope = (x.view(batch, length, -1) for x in (queries, expanded, k_rope))
        q_nope, q_rope = _split(_heads(queries, heads), config.rope_dim)
        k_nope, value = _split(_heads(expanded, heads), config.value_dim)
        k_rope = rotary(k_rope.unsqueeze(1), positions).expand_as(q_rope)
        query = torch.cat((q_nope, rotary(q_rope, positions)), -1)
        return query, torch.cat((k_nope, k_rope), -1), value


class GroupedQueryAttention(nn.Module):
    """`kv_heads` key/value heads, each shared by heads/kv_heads query heads; rotary on the whole head."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.rotary = rotary
        self.query = Linear(config.hidden, config.heads * config.head_dim)
        self.key = Linear(config.hidden, config.kv_heads * config.head_dim)
        self.value = Linear(config.hidden, config.kv_heads * config.head_dim)
        self.core = CoreAttention()
        self.output = Linear(config.heads * config.head_dim, config.hidden)

    def forward(self, x: Tensor, sequences: Sequences = PLAIN) -> Tensor:
        """[B, S, C] -> [B, S, C]; `sequences` say who may attend to whom."""
        config = self.config
        query = self.rotary(_heads(self.query(x), config.heads), sequences.positions)
        key = self.rotary(_heads(self.key(x), config.kv_heads), sequences.positions)
        value = _heads(self.value(x), config.kv_heads)
        drop = config.attention_dropout if self.training else 0.0
        result: Tensor = self.output(_attend(self.core, query, key, value, drop, sequences.mask(x)))
        return result


ATTENTIONS: dict[Attention, type[LatentAttention] | type[GroupedQueryAttention]] = {
    Attention.MLA: LatentAttention,
    Attention.GQA: GroupedQueryAttention,
}


def _itself(x: Tensor) -> Tensor:
    return x


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, S, H*d] -> [B, H, S, d]."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def _split(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Cut the last dimension in two, the second part `last` wide."""
    first, second = x.split_with_sizes((x.shape[-1] - last, last), -1)
    return first, second


def _attend(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None
) -> Tensor:
    """The core attention, rebuilt in backward where that is asked for; arguments and result as the core's."""
    result: Tensor = rebuild(
        RecomputeModule.CORE_ATTN, partial(_mix, core, dropout), query, key, value, mask, draws=dropout > 0
    )
    return result


def _mix(core: CoreAttention, dropout: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    result: Tensor = core(query, key, value, dropout, mask)
    return result
