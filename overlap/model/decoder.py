"""Decoder: embedding, layers, MTP depths, head; and the Program that runs them.

Legend: B sequences, S positions, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder, Value
from overlap.dispatch import LocalTransport, Transport
from overlap.ir import Program
from overlap.model.config import ModelConfig
from overlap.model.feeds import check_feeds
from overlap.model.head import Head, TiedHead
from overlap.model.init import init_weights
from overlap.model.layers import DecoderEntry, DenseLayer, MoELayer
from overlap.model.mtp import MTPDepth, MTPEntry, make_depths
from overlap.model.precision import DTYPES, default_dtype
from overlap.model.residual import expand
from overlap.model.rope import Rotary
from overlap.model.sequences import sequence_feeds
from overlap.model.weights import Weights
from recompute.errors import ConfigError

_LOCAL = LocalTransport()
Init = Callable[[nn.Module, int], None]
"""init(model, seed) fills every parameter."""


class Decoder(nn.Module):
    """A DeepSeek-V3-shaped language model.

    It has no forward of its own: `program()` gives its stages, which the engine or a plain loop runs.

    Args:
        config: The shape.
        transport: Moves tokens between ranks; the default keeps them.
        seed: Of the initial weights.
        init: Fills the parameters.
    """

    def __init__(
        self, config: ModelConfig, *, transport: Transport = _LOCAL, seed: int = 0, init: Init = init_weights
    ) -> None:
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
            self.mtp = nn.ModuleList(make_depths(config, rotary, transport))
        init(self, seed)

    def program(self) -> Program:
        """The stages of one microbatch.

        Inputs are `ids` and `labels` [B, S] int64 (no labels with `labels=False`) and those of `sequence_feeds`;
        losses are `loss`, `mtp1_loss`, ... and those of the routers. Parameters are captured as they are now: build
        again after adding adapters.
        """
        b = ProgramBuilder()
        b.check_feeds(partial(check_feeds, self.config))
        names = ("ids", *(("labels",) if self.config.labels else ()), *sequence_feeds(self.config))
        feeds = {name: b.input(name) for name in names}
        weights = Weights(b, self._shared(), self)
        tokens = tuple(feeds[name] for name in sequence_feeds(self.config))
        state = self._build_embed(b, weights, feeds["ids"])
        entry = DecoderEntry(self.config)
        for index, layer in enumerate(self.layers):
            with b.layer(index):
                state = cast("DenseLayer | MoELayer", layer).build(b, weights, entry, (state, *tokens))
        outputs = self._build_depths(b, weights, state, feeds["ids"], tokens)
        reads = (state, *outputs, *(feeds[name] for name in self.head.feeds))
        tied = (weights.value(self.embedding),) if self.config.tied else ()
        # shared parameters come last among a stage's reads, so a tied matrix is handed over like one of them
        bound = weights.bind(self.head, (*reads, *tied), (self.head,))
        losses = b.compute(
            "head", bound.forward, *bound.reads, outputs=self.head.loss_names, wgrad=True, parameters=bound.parameters
        )
        for name, loss in zip(self.head.loss_names, losses, strict=True):
            b.loss(loss, self.head.loss_weight(name))
        return b.build()

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """[B, S] int64, [V, C] -> the residual state, [B, S, C] or [B, S, n, C].

        Raises:
            ConfigError: The sequences are longer than `max_seq`.
        """
        if ids.shape[1] > self.config.max_seq:
            rule = f"must be at least the sequence length ({ids.shape[1]})"
            raise ConfigError(field="max_seq", value=self.config.max_seq, rule=rule)
        return expand(F.embedding(ids, weight), self.config)

    def _shared(self) -> dict[str, nn.Parameter]:
        """Parameters that several stages read, by name: they are values of the program (R3)."""
        config = self.config
        shared = {"embedding": self.embedding} if config.tied or config.mtp else {}
        if config.mtp and config.mhc is None:
            # depth 1 starts from the final-normed state, and the head reads that too
            shared["final_norm"] = self.head.norm.weight
        if config.mtp_repeat:
            shared |= {f"mtp.{name}": parameter for name, parameter in self.mtp[0].named_parameters()}
        return shared

    def _build_embed(self, b: ProgramBuilder, weights: Weights, ids: Value) -> Value:
        if self.config.tied or self.config.mtp:
            (state,) = b.compute("embed", self.embed, ids, weights.value(self.embedding), outputs=("embedded",))
        else:
            (state,) = b.compute("embed", self._embed_own, ids, outputs=("embedded",), parameters=(self.embedding,))
        return state

    def _embed_own(self, ids: Tensor) -> Tensor:
        return self.embed(ids, self.embedding)

    def _build_depths(
        self, b: ProgramBuilder, weights: Weights, state: Value, ids: Value, tokens: tuple[Value, ...]
    ) -> list[Value]:
        """Add the MTP depths, layers after the decoder's; returns the output of each."""
        outputs: list[Value] = []
        for depth in range(1, self.config.mtp + 1):
            module = cast("MTPDepth", self.mtp[0 if self.config.mtp_repeat else depth - 1])
            opening = self.head.norm if depth == 1 and self.config.mhc is None else nn.Identity()
            with b.layer(self.config.layers + depth - 1, mtp=True):
                reads = (state, ids, weights.value(self.embedding), *tokens)
                state, output = module.build(b, weights, MTPEntry(module, depth, opening), reads)
            outputs.append(output)
        return outputs
