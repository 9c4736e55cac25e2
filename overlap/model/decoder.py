"""Decoder: embedding, layers, head; and the Program that runs them.

Legend: B sequences, S positions, C hidden, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder, Value
from overlap.dispatch import LocalTransport, Transport
from overlap.ir import Program
from overlap.model.config import ModelConfig
from overlap.model.head import Head, TiedHead
from overlap.model.init import init_weights
from overlap.model.layers import DenseLayer, MoELayer
from overlap.model.precision import DTYPES, default_dtype
from overlap.model.rope import Rotary
from recompute.errors import ConfigError

_LOCAL = LocalTransport()


class Decoder(nn.Module):
    """A DeepSeek-V3-shaped language model.

    It has no forward of its own: `program()` gives its stages, which the engine or a plain loop runs.

    Args:
        config: The shape.
        transport: Moves tokens between ranks; the default keeps them.
        seed: Of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, transport: Transport = _LOCAL, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config)
        with default_dtype(DTYPES[config.dtype]):
            self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden))
            self.layers = nn.ModuleList(
                DenseLayer(config, rotary) if index < config.dense_layers else MoELayer(config, rotary, transport)
                for index in range(config.layers)
            )
            self.head = TiedHead(config) if config.tied else Head(config)
        init_weights(self, seed)

    def program(self) -> Program:
        """The stages of one microbatch: inputs `ids` and `labels` [B, S] int64, scalar `loss` and the router losses.

        Parameters are captured as they are now: build again after adding adapters.
        """
        b = ProgramBuilder()
        ids, labels = b.input("ids"), b.input("labels")
        tied = (b.parameter("embedding", self.embedding),) if self.config.tied else ()
        hidden = self._build_embed(b, ids, tied)
        for index, layer in enumerate(self.layers):
            with b.layer(index):
                hidden = cast("DenseLayer | MoELayer", layer).build(b, hidden)
        (loss,) = b.compute(
            "head", self.head, hidden, labels, *tied,
            outputs=("loss",), wgrad=True, parameters=self.head.parameters(),
        )  # fmt: skip
        b.loss(loss)
        return b.build()

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """[B, S] int64, [V, C] -> [B, S, C].

        Raises:
            ConfigError: The sequences are longer than `max_seq`.
        """
        if ids.shape[1] > self.config.max_seq:
            rule = f"must be at least the sequence length ({ids.shape[1]})"
            raise ConfigError(field="max_seq", value=self.config.max_seq, rule=rule)
        return F.embedding(ids, weight)

    def _build_embed(self, b: ProgramBuilder, ids: Value, tied: tuple[Value, ...]) -> Value:
        if tied:
            (hidden,) = b.compute("embed", self.embed, ids, *tied, outputs=("embedded",))
        else:
            (hidden,) = b.compute("embed", self._embed_own, ids, outputs=("embedded",), parameters=(self.embedding,))
        return hidden

    def _embed_own(self, ids: Tensor) -> Tensor:
        return self.embed(ids, self.embedding)
