"""Multi-token prediction (DeepSeek-V3 report, section 2.2): depth d predicts the token d places behind the next one.

A depth joins the state of the depth before with the embedding of the tokens d places ahead, runs a layer of its own
(or the one repeated layer) and hands its state on. Everything that depends on the depth is computed from the depth's
number and the feeds as they came; nothing is rolled in place, so a replay sees what its first pass saw.
Legend: B sequences, S positions, n streams, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder, Value
from overlap.dispatch import Transport
from overlap.model.config import ModelConfig
from overlap.model.layers import DenseLayer, MoELayer
from overlap.model.linear import Linear
from overlap.model.norm import RMSNorm
from overlap.model.residual import make_contraction
from overlap.model.rope import Rotary
from overlap.model.sequences import Sequences, as_sequences, sequence_feeds
from overlap.model.weights import Weights


class Join(nn.Module):
    """Join hidden state and embedding: norm both, then one projection of both side by side, embedding first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_norm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.projection = Linear(2 * config.hidden, config.hidden)

    def forward(self, hidden: Tensor, token: Tensor) -> Tensor:
        """[B, S, C] twice -> [B, S, C]."""
        joined: Tensor = self.projection(torch.cat((self.token_norm(token), self.hidden_norm(hidden)), -1))
        return joined


class StreamJoin(nn.Module):
    """The same for streams: each is projected by itself, the projected embedding is added to all of them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_norm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.token_projection = Linear(config.hidden, config.hidden)
        self.hidden_projection = Linear(config.hidden, config.hidden)

    def forward(self, streams: Tensor, token: Tensor) -> Tensor:
        """[B, S, n, C] and [B, S, C] -> [B, S, n, C]."""
        added: Tensor = self.token_projection(self.token_norm(token))
        joined: Tensor = added.unsqueeze(-2) + self.hidden_projection(self.hidden_norm(streams))
        return joined


class MTPDepth(nn.Module):
    """The modules of one depth, or of all of them where the layer is repeated."""

    def __init__(self, config: ModelConfig, rotary: Rotary, transport: Transport) -> None:
        super().__init__()
        self.config = config
        self.join = Join(config) if config.mhc is None else StreamJoin(config)
        self.layer = DenseLayer(config, rotary) if config.mtp_dense else MoELayer(config, rotary, transport)
        self.contraction = make_contraction(config)
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def build(
        self, b: ProgramBuilder, weights: Weights, entry: MTPEntry, reads: Sequence[Value]
    ) -> tuple[Value, Value]:
        """Add this depth's stages to the builder's current layer: those of its layer, then `mtp_post`.

        Returns:
            What the next depth starts from, and the output [B, S, C] that the head reads.
        """
        state = self.layer.build(b, weights, entry, reads)
        end = weights.bind(self.finish, (state,), (self.contraction, self.norm))
        (output,) = b.compute(
            "mtp_post", end.forward, *end.reads, outputs=("output",), parameters=end.parameters, state=end.state
        )
        return (output if self.config.mhc is None else state), output

    def finish(self, state: Tensor) -> Tensor:
        """Stage `mtp_post`: contraction of the streams and final norm, -> [B, S, C]."""
        output: Tensor = self.norm(self.contraction(state))
        return output


class MTPEntry:
    """What the first stage of a depth does before attention.

    Args:
        module: The depth's modules.
        depth: From 1 up.
        opening: Applied to the state that the depth reads first (the final norm, at depth 1 without streams).
    """

    def __init__(self, module: MTPDepth, depth: int, opening: nn.Module) -> None:
        self._config = module.config
        self._feeds = sequence_feeds(module.config)
        self._depth = depth
        self._opening = opening
        self._join = module.join
        self.modules: Sequence[nn.Module] = (opening, module.join)

    def __call__(self, *reads: Tensor) -> tuple[Tensor, Sequences]:
        """Join the state with the embedding of the tokens ahead.

        Args:
            reads: State [B, S, C] or [B, S, n, C], ids [B, S], embedding [V, C], the feeds that describe the tokens.
        """
        state, ids, embedding, *feeds = reads
        sequences = as_sequences(self._feeds, feeds)
        hidden = self._opening(state)
        token = F.embedding(sequences.ahead(ids, self._depth, fill=0), embedding)
        if self._config.mtp_detach:
            hidden, token = hidden.detach(), token.detach()
        return self._join(hidden, token), sequences.at_depth(self._depth)

    def sequences(self, *feeds: Tensor) -> Sequences:
        """The tokens as this depth sees them."""
        return as_sequences(self._feeds, feeds).at_depth(self._depth)


def make_depths(config: ModelConfig, rotary: Rotary, transport: Transport) -> list[MTPDepth]:
    """The modules of all depths: one each, or a single one that is repeated."""
    count = 1 if config.mtp_repeat else config.mtp
    return [MTPDepth(_at(config, depth), rotary, transport) for depth in range(count)]


def _at(config: ModelConfig, depth: int) -> ModelConfig:
    """The config of one depth's layer."""
    if not config.mtp_widths:
        return config
    width = config.mtp_widths[depth]
    return replace(config, ffn_width=width, expert_width=width)
