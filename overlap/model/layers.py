"""The two kinds of decoder layer, cut into stages.

Legend: B sequences, S positions, C hidden, T = B*S tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from overlap.builder import ProgramBuilder, Value
from overlap.dispatch import Routing, Transport
from overlap.model.attention import ATTENTIONS
from overlap.model.config import ModelConfig
from overlap.model.dropout import dropout
from overlap.model.experts import GroupedExperts, SwiGLU
from overlap.model.norm import RMSNorm
from overlap.model.permute import permute, reorder, unpermute, unpermute_adjoint
from overlap.model.rope import Rotary
from overlap.model.router import Router

Gradients = Sequence[Tensor | None]


class AttentionBlock(nn.Module):
    """Norm, attention, residual, and the norm that the feed-forward starts with."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = ATTENTIONS[config.attention](config, rotary)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)

    @property
    def draws_rng(self) -> bool:
        """Whether forward draws random numbers in training."""
        return self.config.dropout > 0 or self.config.attention_dropout > 0

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, C] -> the residual stream and the feed-forward's input, both [B, S, C]."""
        update = self.attention(self.norm(hidden))
        residual = hidden + dropout(update, self.config.dropout, training=self.training)
        return residual, self.ffn_norm(residual)


class DenseLayer(nn.Module):
    """Stages `attn`, `experts` (one SwiGLU for all tokens) and `post`."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.attn = AttentionBlock(config, rotary)
        self.ffn = SwiGLU(config.hidden, config.ffn_width)

    def build(self, b: ProgramBuilder, hidden: Value) -> Value:
        """Add this layer's stages to the builder's current layer; `hidden` [B, S, C] in and out."""
        residual, ffn_input = b.compute(
            "attn", self.attn, hidden, outputs=("residual", "ffn_input"), wgrad=True,
            draws_rng=self.attn.draws_rng, parameters=self.attn.parameters(),
        )  # fmt: skip
        (update,) = b.compute(
            "experts", self.ffn, ffn_input, outputs=("ffn_output",), wgrad=True, parameters=self.ffn.parameters()
        )
        (out,) = b.compute(
            "post", self.post, update, residual, outputs=("hidden",),
            adjoint=self.post_adjoint, draws_rng=self.config.dropout > 0,
        )  # fmt: skip
        return out

    def post(self, update: Tensor, residual: Tensor) -> Tensor:
        """Add the feed-forward's output to the residual stream, both [B, S, C]."""
        return dropout(update, self.config.dropout, training=self.training) + residual

    def post_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        """Backward of post(): draws the same noise, reads no activation (R8)."""
        (grad,) = grads
        if grad is None:
            return None, None
        return dropout(grad, self.config.dropout, training=self.training), grad


class MoELayer(nn.Module):
    """Stages `attn`, `shared` (if there is a shared expert), `dispatch`, `experts`, `combine` and `post`."""

    def __init__(self, config: ModelConfig, rotary: Rotary, transport: Transport) -> None:
        super().__init__()
        self.config = config
        self.transport = transport
        self.attn = AttentionBlock(config, rotary)
        self.router = Router(config)
        self.experts = GroupedExperts(config.experts, config.hidden, config.expert_width)
        # a list of none or one: the stages then need no second form
        self.shared = nn.ModuleList([SwiGLU(config.hidden, config.shared_width)] if config.shared_width else [])

    def build(self, b: ProgramBuilder, hidden: Value) -> Value:
        """Add this layer's stages to the builder's current layer; `hidden` [B, S, C] in and out."""
        values = self._build_attn(b, hidden)
        shared = tuple(
            b.compute(
                "shared", expert, values["ffn_input"], outputs=("shared",), wgrad=True, parameters=expert.parameters()
            )[0]
            for expert in self.shared
        )
        transport, routing = self.transport, values["routing"]
        tokens, probs = b.comm(
            "dispatch", transport.dispatch, values["tokens"], values["probs"], routing,
            outputs=("dispatched", "dispatched_probs"), adjoint=transport.dispatch_adjoint,
        )  # fmt: skip
        (rows,) = b.compute(
            "experts", self.experts, tokens, probs, routing,
            outputs=("expert_output",), wgrad=True, parameters=self.experts.parameters(),
        )  # fmt: skip
        (combined,) = b.comm(
            "combine", transport.combine, rows, routing, outputs=("combined",), adjoint=transport.combine_adjoint
        )
        (out,) = b.compute(
            "post", self.post, combined, values["residual"], routing, *shared,
            outputs=("hidden",), adjoint=self.post_adjoint, draws_rng=self.config.dropout > 0,
        )  # fmt: skip
        return out

    def attend_and_route(self, hidden: Tensor, pinned: tuple[Routing] | None = None) -> tuple[Any, ...]:
        """Stage `attn`: attention, router, permutation.

        Args:
            hidden: [B, S, C].
            pinned: (routing,) of the first pass in a replay.

        Returns:
            tokens [T*k, C] and probs [T*k] in expert order, residual [B, S, C], ffn_input [B, S, C] if a shared
            expert reads it, the router's losses, routing, counts [E].
        """
        residual, ffn_input = self.attn(hidden)
        flat = ffn_input.flatten(0, 1)
        probs, routing, losses = self.router(flat, None if pinned is None else pinned[0])
        shared_input = (ffn_input,) if self.config.shared_width else ()
        tokens = permute(flat, routing)
        return (tokens, reorder(probs, routing), residual, *shared_input, *losses, routing, routing.counts)

    def post(self, combined: Tensor, residual: Tensor, routing: Routing, *shared: Tensor) -> Tensor:
        """Sum each token's rows [T*k, C] and the shared expert's output, add to the residual stream [B, S, C]."""
        update = unpermute(combined, routing).view_as(residual)
        for output in shared:
            update = update + output
        return dropout(update, self.config.dropout, training=self.training) + residual

    def post_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Backward of post(): reads routing, draws the same noise, reads no activation (R8)."""
        (grad,) = grads
        routing: Routing = pinned[0]
        if grad is None:
            return (None,) * (3 + len(self.shared))
        update = dropout(grad, self.config.dropout, training=self.training)
        rows = unpermute_adjoint(update.flatten(0, 1), routing)
        return (rows, grad, None, *(update for _ in self.shared))

    def _build_attn(self, b: ProgramBuilder, hidden: Value) -> dict[str, Value]:
        shared_input = ("ffn_input",) if self.config.shared_width else ()
        outputs = ("tokens", "probs", "residual", *shared_input, *self.router.loss_names)
        nondiff = ("routing", "counts")
        written = b.compute(
            "attn", self.attend_and_route, hidden, outputs=outputs, nondiff=nondiff, wgrad=True, pins=("routing",),
            effects=self.router.effects, draws_rng=self.attn.draws_rng or self.config.jitter > 0,
            parameters=(*self.attn.parameters(), *self.router.parameters()),
        )  # fmt: skip
        values = dict(zip((*outputs, *nondiff), written, strict=True))
        for name in self.router.loss_names:
            b.loss(values[name])
        return values
