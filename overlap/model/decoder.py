"""Decoder: embedding, layers, MTP depths, head; and the Program that runs them.

Legend: B sequences, S positions, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from types import NoneType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder, Value
from overlap.dispatch import LocalTransport, Transport
from overlap.ir import Program
from overlap.model.backend import Backend, TorchBackend
from overlap.model.config import ModelConfig
from overlap.model.cut import NO_BORDER, Border, Cut
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
from overlap.transfers import RECEIVE, SEND
from recompute.checks import check_integer, check_kind
from recompute.errors import ConfigError

_LOCAL = LocalTransport()
ARRIVING = "arriving"
"""Feed of a part that does not open the model: where the residual state arrives."""
_OWN = frozenset({"dtype", "max_seq"})
"""Fields of the config that ranks do not compare: parameters may be converted, and say their type themselves."""
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
        cut: The part to hold; None: all of it. Numbers of layers and names of parameters are the whole model's, and so
            are the initial weights.
        border: What joins a part to the others.
        split_embedding: Whether the MTP depths and a tied head read a copy of the embedding, `late_embedding`. The
            last part of a cut model always does; each copy adds up its own gradient.

    Raises:
        ConfigError: An argument is not what it should be, or `cut` has layers that the config has not.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        transport: Transport = _LOCAL,
        seed: int = 0,
        init: Init = init_weights,
        cut: Cut | None = None,
        border: Border = NO_BORDER,
        split_embedding: bool = False,
    ) -> None:
        super().__init__()
        _check_arguments(config, transport, seed, cut, border)
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
        self.backend: Backend = TorchBackend()
        """Where its modules come from; a backend's convert() sets it."""
        init(self, seed)
        self.cut = Cut.whole(config.layers) if cut is None else cut
        self.border = border
        self.split_embedding = self._reads_late and (split_embedding or not (self.cut.opens and self.cut.closes))
        self._keep_part()

    @property
    def late_name(self) -> str:
        """Name of the parameter that the MTP depths and a tied head read as the embedding."""
        return "late_embedding" if self.split_embedding else "embedding"

    @property
    def _late(self) -> nn.Parameter:
        return cast("nn.Parameter", getattr(self, self.late_name))

    @property
    def per_token_loss(self) -> bool:
        """Whether the losses are sums over tokens; or means."""
        return self.config.per_token_loss

    @property
    def compared_settings(self) -> Mapping[str, object]:
        """Its config, but for what a rank may choose by itself: how long its sequences may be."""
        config = self.config
        return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OWN}

    @property
    def feed_names(self) -> tuple[str, ...]:
        """What a microbatch feeds the whole model: `ids`, `labels` unless they are derived, and those of its tokens."""
        return ("ids", *(("labels",) if self.config.labels else ()), *sequence_feeds(self.config))

    def state_shape(self, ids: Tensor) -> tuple[int, ...]:
        """Shape of the residual state between two layers, for ids [B, S]: [B, S, C] or [B, S, n, C]."""
        streams = () if self.config.mhc is None else (self.config.mhc,)
        return (*ids.shape, *streams, self.config.hidden)

    def _keep_part(self) -> None:
        """Let go of what this part does not hold; an empty module keeps the place of a layer, and so its name."""
        if self.split_embedding and self.cut.closes:
            self.late_embedding = nn.Parameter(self.embedding.detach().clone())
        if not self.cut.opens:
            del self.embedding
        for index in range(self.config.layers):
            if index not in self.cut.layers:
                self.layers[index] = nn.Identity()
        if not self.cut.closes:
            self.mtp = nn.ModuleList()
            self.register_module("head", nn.Identity())

    @property
    def _reads_late(self) -> bool:
        """Whether anything but the stage `embed` reads the embedding."""
        return self.config.tied or self.config.mtp > 0

    def program(self) -> Program:
        """The stages of one microbatch.

        Inputs are `ids` and `labels` [B, S] int64 (no labels with `labels=False`) and those of `sequence_feeds`;
        losses are `loss`, `mtp1_loss`, ... and those of the routers. Parameters are captured as they are now: build
        again after adding adapters.
        """
        cut = self.cut
        b = ProgramBuilder(first_layer=cut.first)
        b.check_feeds(partial(check_feeds, self.config))
        b.check_feeds(self.backend.check_feeds)
        for moving in self.backend.step_states(self):
            b.step_state(moving)
        feeds = {name: b.input(name) for name in self._own_feeds()}
        weights = Weights(b, self._shared(), self)
        state = self._build_entrance(b, weights, feeds)
        tokens = tuple(feeds[name] for name in sequence_feeds(self.config) if name in feeds)
        entry = DecoderEntry(self.config)
        for index in cut.layers:
            with b.layer(index, context=self.backend.context(index, self.config.layers)):
                state = cast("DenseLayer | MoELayer", self.layers[index]).build(b, weights, entry, (state, *tokens))
        if cut.closes:
            self._build_end(b, weights, state, feeds, tokens)
        else:
            border = self.border
            b.comm(SEND, border.send, state, outputs=(), adjoint=border.await_gradient, lane=border.lane_out)
        return b.build()

    def _own_feeds(self) -> tuple[str, ...]:
        """The feeds that this part reads."""
        config, cut = self.config, self.cut
        wanted: set[str] = {"ids"} if cut.opens or (cut.closes and config.mtp > 0) else set()
        wanted |= set(self.head.feeds) if cut.closes else set()
        wanted |= set(sequence_feeds(config)) if cut.layers or (cut.closes and config.mtp > 0) else set()
        return tuple(name for name in self.feed_names if name in wanted)

    def _build_entrance(self, b: ProgramBuilder, weights: Weights, feeds: Mapping[str, Value]) -> Value:
        """Add what the first layer's state comes from: the embedding, or the part before."""
        if self.cut.opens:
            return self._build_embed(b, weights, feeds["ids"])
        border = self.border
        arriving = b.input(ARRIVING, needs_grad=True)
        (state,) = b.comm(
            RECEIVE, border.receive, arriving, outputs=("received",),
            adjoint=border.return_gradient, lane=border.lane_in,
        )  # fmt: skip
        return state

    def _build_end(
        self, b: ProgramBuilder, weights: Weights, state: Value, feeds: Mapping[str, Value], tokens: tuple[Value, ...]
    ) -> None:
        """Add the MTP depths and the head."""
        outputs = self._build_depths(b, weights, state, feeds, tokens)
        reads = (state, *outputs, *(feeds[name] for name in self.head.feeds))
        tied = (weights.value(self._late),) if self.config.tied else ()
        # shared parameters come last among a stage's reads, so a tied matrix is handed over like one of them
        bound = weights.bind(self.head, (*reads, *tied), (self.head,))
        losses = b.compute(
            "head", bound.forward, *bound.reads, outputs=self.head.loss_names, wgrad=True,
            parameters=bound.parameters, state=bound.state,
        )  # fmt: skip
        for name, loss in zip(self.head.loss_names, losses, strict=True):
            b.loss(loss, self.head.loss_weight(name))

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
        if not self.cut.closes:
            return {}
        shared = {self.late_name: self._late} if self._reads_late else {}
        if config.mtp and config.mhc is None:
            # depth 1 starts from the final-normed state, and the head reads that too
            shared["final_norm"] = self.head.norm.weight
        if config.mtp_repeat:
            shared |= {f"mtp.{name}": parameter for name, parameter in self.mtp[0].named_parameters()}
        return shared

    def _build_embed(self, b: ProgramBuilder, weights: Weights, ids: Value) -> Value:
        if self._reads_late and not self.split_embedding:
            (state,) = b.compute("embed", self.embed, ids, weights.value(self.embedding), outputs=("embedded",))
        else:
            (state,) = b.compute("embed", self._embed_own, ids, outputs=("embedded",), parameters=(self.embedding,))
        return state

    def _embed_own(self, ids: Tensor) -> Tensor:
        return self.embed(ids, self.embedding)

    def _build_depths(
        self, b: ProgramBuilder, weights: Weights, state: Value, feeds: Mapping[str, Value], tokens: tuple[Value, ...]
    ) -> list[Value]:
        """Add the MTP depths, layers after the decoder's; returns the output of each."""
        outputs: list[Value] = []
        for depth in range(1, self.config.mtp + 1):
            module = cast("MTPDepth", self.mtp[0 if self.config.mtp_repeat else depth - 1])
            opening = self.head.norm if depth == 1 and self.config.mhc is None else nn.Identity()
            number = self.config.layers + depth - 1
            with b.layer(number, mtp=True, context=self.backend.context(number, self.config.layers)):
                reads = (state, feeds["ids"], weights.value(self._late), *tokens)
                state, output = module.build(b, weights, MTPEntry(module, depth, opening), reads)
            outputs.append(output)
        return outputs


def _check_arguments(config: ModelConfig, transport: object, seed: object, cut: Cut | None, border: object) -> None:
    check_kind("config", config, ModelConfig, "a ModelConfig")
    check_kind("transport", transport, Transport, "a transport, as LocalTransport()")
    check_integer("seed", seed)
    check_kind("cut", cut, (Cut, NoneType), "a Cut or None")
    check_kind("border", border, Border, "a border, as NO_BORDER")
    if cut is not None and cut.end > config.layers:
        raise ConfigError(field="cut", value=cut, rule=f"must end within the model's layers ({config.layers})")
