"""The two kinds of decoder layer, cut into stages.

Legend: B sequences, S positions, C hidden, T = B*S tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from overlap.builder import ProgramBuilder, Value
from overlap.dispatch import Arrival, LocalTransport, Routing, Transport
from overlap.model.attention import ATTENTIONS
from overlap.model.config import Attention, ModelConfig
from overlap.model.dropout import dropout
from overlap.model.experts import GroupedExperts, SwiGLU
from overlap.model.graph_only import second_form
from overlap.model.norm import RMSNorm
from overlap.model.permute import Permutation, reorder, take_rows
from overlap.model.residual import make_residual
from overlap.model.rope import Rotary
from overlap.model.router import Router
from overlap.model.sequences import Sequences, as_sequences, sequence_feeds
from overlap.model.weights import Weights
from recompute.inner import rebuild
from recompute.modules import RecomputeModule

Gradients = Sequence[Tensor | None]


class Entry(Protocol):
    """What a layer's first stage does before attention."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose parameters it uses."""

    def __call__(self, *reads: Tensor) -> tuple[Tensor, Sequences]:
        """The residual state that the layer works on, and what attention and router need to know of its tokens."""

    def sequences(self, *feeds: Tensor) -> Sequences:
        """The latter alone, for a stage that starts from what attention left."""


class DecoderEntry:
    """The state as the layer before left it."""

    modules: Sequence[nn.Module] = ()

    def __init__(self, config: ModelConfig) -> None:
        self._feeds = sequence_feeds(config)

    def __call__(self, *reads: Tensor) -> tuple[Tensor, Sequences]:
        """Take the state and the feeds that describe the tokens."""
        hidden, *feeds = reads
        return hidden, self.sequences(*feeds)

    def sequences(self, *feeds: Tensor) -> Sequences:
        """Take the feeds that describe the tokens."""
        return as_sequences(self._feeds, feeds)


class Front(NamedTuple):
    """The stage that a layer's feed-forward starts from: `attn`, or `post_attn` where the layer is cut."""

    name: str
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...], Sequences]]
    """What it reads -> the feed-forward's input [B, S, C], the values named in `writes`, what is known of the tokens.
    """
    reads: Sequence[Value]
    modules: Sequence[nn.Module]
    """Where its parameters are."""
    writes: Sequence[str]
    """What the residual carries past the feed-forward and is not there yet."""
    carried: Mapping[str, Value]
    """What is there, by name; it comes first among what the residual carries."""
    inner: Sequence[RecomputeModule]
    draws_rng: bool


class AttentionBlock(nn.Module):
    """Norm, attention, residual, and the norm that the feed-forward starts with."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.residual = make_residual(config)
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = ATTENTIONS[config.attention](config, rotary)
        self.ffn_residual = make_residual(config)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)

    @property
    def inner(self) -> tuple[RecomputeModule, ...]:
        """What forward can rebuild in its backward."""
        latent = (RecomputeModule.MLA_UP_PROJ,) if self.config.attention is Attention.MLA else ()
        return (RecomputeModule.CORE_ATTN, RecomputeModule.LAYERNORM, *latent)

    @property
    def draws_rng(self) -> bool:
        """Whether forward draws random numbers in training."""
        return self.config.dropout > 0 or self.config.attention_dropout > 0

    def forward(self, state: Tensor, sequences: Sequences) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Residual state -> the feed-forward's input [B, S, C], and what `ffn_residual.merge` needs."""
        return self.prepare(self.attend(state, sequences))

    def attend(self, state: Tensor, sequences: Sequences) -> Tensor:
        """Residual state -> the residual state behind attention."""
        x, carried = self.residual.split(state)
        update = self.attention(rebuild(RecomputeModule.LAYERNORM, self.norm, x), sequences)
        return self.residual.merge(update, *carried)

    def prepare(self, state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Residual state behind attention -> the feed-forward's input, and what `ffn_residual.merge` needs."""
        x, carried = self.ffn_residual.split(state)
        return rebuild(RecomputeModule.LAYERNORM, self.ffn_norm, x), carried

    def build(
        self, b: ProgramBuilder, weights: Weights, entry: Entry, reads: Sequence[Value], feeds: Sequence[Value]
    ) -> Front:
        """Describe the stage that the feed-forward starts from; of a cut layer, add the one before it.

        Args:
            b: The builder.
            weights: Says which parameters are values.
            entry: What comes before attention.
            reads: What it reads.
            feeds: Those of the reads that tell the feed-forward of its tokens.
        """
        carried = self.ffn_residual.carried
        if not self.config.cut_attention:
            return Front(
                name="attn", forward=partial(self._whole, entry), reads=reads, modules=(*entry.modules, self),
                writes=carried, carried={}, inner=self.inner, draws_rng=self.draws_rng,
            )  # fmt: skip
        modules = (*entry.modules, self.residual, self.norm, self.attention)
        bound = weights.bind(partial(self._first, entry), reads, modules)
        # what the residual carries begins with the state itself, so `post` reads it from here
        (state,) = b.compute(
            "attn", bound.forward, *bound.reads, outputs=carried[:1], wgrad=True, draws_rng=self.draws_rng,
            parameters=bound.parameters, state=bound.state, inner=self.inner,
        )  # fmt: skip
        return Front(
            name="post_attn", forward=partial(self._second, entry), reads=(state, *feeds),
            modules=(self.ffn_residual, self.ffn_norm), writes=carried[1:], carried={carried[0]: state},
            inner=(RecomputeModule.LAYERNORM,), draws_rng=False,
        )  # fmt: skip

    def _whole(self, entry: Entry, *reads: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Sequences]:
        state, sequences = entry(*reads)
        return *self(state, sequences), sequences

    def _first(self, entry: Entry, *reads: Tensor) -> Tensor:
        return self.attend(*entry(*reads))

    def _second(self, entry: Entry, state: Tensor, *feeds: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Sequences]:
        ffn_input, carried = self.prepare(state)
        return ffn_input, carried[1:], entry.sequences(*feeds) if feeds else Sequences()


class DenseLayer(nn.Module):
    """Stages `attn` (and `post_attn` if it is cut), `experts` (one SwiGLU for all tokens) and `post`."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.attn = AttentionBlock(config, rotary)
        self.ffn = SwiGLU(config.hidden, config.ffn_width)

    def build(self, b: ProgramBuilder, weights: Weights, entry: Entry, reads: Sequence[Value]) -> Value:
        """Add this layer's stages to the builder's current layer.

        Args:
            b: The builder.
            weights: Says which parameters are values.
            entry: What comes before attention.
            reads: What it reads.

        Returns:
            The residual state, [B, S, C] or [B, S, n, C].
        """
        front = self.attn.build(b, weights, entry, reads, ())
        attn = weights.bind(partial(self.attend, front), front.reads, front.modules)
        residual = self.attn.ffn_residual
        ffn_input, *carried = b.compute(
            front.name, attn.forward, *attn.reads, outputs=("ffn_input", *front.writes), wgrad=True,
            draws_rng=front.draws_rng, parameters=attn.parameters, state=attn.state, inner=front.inner,
        )  # fmt: skip
        ffn = weights.bind(self.ffn, (ffn_input,), (self.ffn,))
        (update,) = b.compute(
            "experts", ffn.forward, *ffn.reads, outputs=("ffn_output",), wgrad=True,
            parameters=ffn.parameters, state=ffn.state, graph_only=second_form(ffn.forward, self.ffn),
        )  # fmt: skip
        (out,) = b.compute(
            "post", residual.merge, update, *front.carried.values(), *carried, outputs=("hidden",),
            adjoint=self.post_adjoint if residual.linear else None, draws_rng=self.config.dropout > 0,
        )  # fmt: skip
        return out

    def attend(self, front: Front, *reads: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Stage `attn` or `post_attn`: the feed-forward's input [B, S, C], and what the residual carries past it."""
        ffn_input, carried, _ = front.forward(*reads)
        return (ffn_input, *carried) if carried else ffn_input

    def post_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        """Backward of a plain residual's merge(): draws the same noise, reads no activation (R8)."""
        (grad,) = grads
        if grad is None:
            return None, None
        return dropout(grad, self.config.dropout, training=self.training), grad


class MoELayer(nn.Module):
    """Stages `attn`, `shared` (if there is a shared expert), `dispatch`, `experts`, `combine` and `post`.

    With `cut_attention`, the router and what stands before it since attention are a stage `post_attn`.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary, transport: Transport) -> None:
        super().__init__()
        self.config = config
        self.transport = transport
        self.attn = AttentionBlock(config, rotary)
        self.router = Router(config)
        self.permutation = Permutation()
        self.experts = GroupedExperts(
            config.experts, config.hidden, config.expert_width, transport.held(config.experts)
        )
        # a list of none or one: the stages then need no second form
        self.shared = nn.ModuleList([SwiGLU(config.hidden, config.shared_width)] if config.shared_width else [])

    def build(self, b: ProgramBuilder, weights: Weights, entry: Entry, reads: Sequence[Value]) -> Value:
        """Add this layer's stages to the builder's current layer; see DenseLayer.build."""
        values = self._build_attn(b, weights, entry, reads)
        shared = self._build_shared(b, weights, values)
        transport, routing = self.transport, values["routing"]
        aliases = type(transport) is LocalTransport
        tokens, probs, arrival = b.comm(
            "dispatch", transport.dispatch, values["tokens"], values["probs"], routing,
            outputs=("dispatched", "dispatched_probs"), nondiff=("arrival",), pins=("arrival",),
            adjoint=transport.dispatch_adjoint, aliases=aliases,
        )  # fmt: skip
        experts = weights.bind(self.apply_experts, (tokens, probs, arrival), (self.experts,))
        (rows,) = b.compute(
            "experts", experts.forward, *experts.reads,
            outputs=("expert_output",), wgrad=True, parameters=experts.parameters, state=experts.state,
            inner=(RecomputeModule.MOE_ACT,), sheds=self.experts.sheds,
            graph_only=second_form(experts.forward, self.experts),
        )  # fmt: skip
        (combined,) = b.comm(
            "combine", transport.combine, rows, routing, arrival, outputs=("combined",),
            adjoint=transport.combine_adjoint, aliases=aliases,
        )  # fmt: skip
        residual = self.attn.ffn_residual
        carried = (values[name] for name in residual.carried)
        (out,) = b.compute(
            "post", self.post, combined, routing, *carried, *shared, outputs=("hidden",),
            adjoint=self.post_adjoint if residual.linear else None, draws_rng=self.config.dropout > 0,
        )  # fmt: skip
        return out

    def attend_and_route(self, front: Front, *reads: Tensor, pinned: tuple[Routing] | None = None) -> tuple[Any, ...]:
        """Stage `attn`: what the entry does, attention, router, permutation; `post_attn`: from the second norm on.

        Args:
            front: What comes before the router.
            reads: What it reads.
            pinned: (routing,) of the first pass in a replay.

        Returns:
            tokens [N, C] and probs [N] in expert order (N as in dispatch.Routing), what the residual carries to
            `post`, ffn_input [B, S, C] if a shared expert reads it, the router's losses, routing, counts [E].
        """
        ffn_input, carried, sequences = front.forward(*reads)
        flat = ffn_input.flatten(0, 1)
        choice = None if pinned is None else pinned[0]
        mask = sequences.padding_mask
        routed = self.router(flat, choice) if mask is None else self.router(flat, choice, padding=mask.flatten())
        probs, routing, losses = routed
        shared_input = (ffn_input,) if self.config.shared_width else ()
        tokens = self.permutation.permute(flat, routing)
        return (tokens, reorder(probs, routing), *carried, *shared_input, *losses, routing, routing.counts)

    def apply_experts(self, rows: Tensor, probs: Tensor, arrival: Arrival, *, graph_only: bool = False) -> Tensor:
        """Apply the experts held here to rows [M, C] with weights [M] as they arrived; the result is ordered alike.

        Rows arrive by sending rank. Sorting them by expert is compute, so it is done here and not on the wire (R11).
        """
        experts = partial(self.experts, graph_only=True) if graph_only else self.experts
        order, inverse = arrival.order, arrival.inverse
        if order is None or inverse is None:
            result: Tensor = experts(rows, probs, arrival)
            return result
        result = experts(take_rows(rows, order, inverse), take_rows(probs, order, inverse), arrival)
        return take_rows(result, inverse, order, graph_only=graph_only)

    def post(self, combined: Tensor, routing: Routing, *others: Tensor) -> Tensor:
        """Sum each token's rows [N, C] and the shared expert's output, merge into the residual state."""
        residual = self.attn.ffn_residual
        carried, shared = others[: len(residual.carried)], others[len(residual.carried) :]
        update = self.permutation.unpermute(combined, routing).view(*carried[0].shape[:2], combined.shape[-1])
        for output in shared:
            update = update + output
        return residual.merge(update, *carried)

    def post_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Backward of post() with a plain residual: reads routing, draws the same noise, reads no activation (R8)."""
        (grad,) = grads
        routing: Routing = pinned[0]
        if grad is None:
            return (None,) * (3 + len(self.shared))
        update = dropout(grad, self.config.dropout, training=self.training)
        rows = self.permutation.unpermute_adjoint(update.flatten(0, 1), routing)
        return (rows, None, grad, *(update for _ in self.shared))

    def _build_attn(
        self, b: ProgramBuilder, weights: Weights, entry: Entry, reads: Sequence[Value]
    ) -> dict[str, Value]:
        shared_input = ("ffn_input",) if self.config.shared_width else ()
        # the feeds that describe the tokens come last among the reads; a router takes the mask from them
        feeds = reads[-len(sequence_feeds(self.config)) :] if self.config.padding else ()
        front = self.attn.build(b, weights, entry, reads, feeds)
        outputs = ("tokens", "probs", *front.writes, *shared_input, *self.router.loss_names)
        nondiff = ("routing", "counts")
        bound = weights.bind(partial(self.attend_and_route, front), front.reads, (*front.modules, self.router))
        written = b.compute(
            front.name, bound.forward, *bound.reads, outputs=outputs, nondiff=nondiff, wgrad=True, pins=("routing",),
            effects=self.router.effects, draws_rng=front.draws_rng or self.config.jitter > 0,
            parameters=bound.parameters, state=bound.state, inner=front.inner,
        )  # fmt: skip
        values = {**front.carried, **dict(zip((*outputs, *nondiff), written, strict=True))}
        for name in self.router.loss_names:
            b.loss(values[name])
        return values

    def _build_shared(self, b: ProgramBuilder, weights: Weights, values: dict[str, Value]) -> tuple[Value, ...]:
        outputs: list[Value] = []
        for module in self.shared:
            bound = weights.bind(module, (values["ffn_input"],), (module,))
            outputs += b.compute(
                "shared", bound.forward, *bound.reads, outputs=("shared",), wgrad=True,
                parameters=bound.parameters, state=bound.state, graph_only=second_form(bound.forward, module),
            )  # fmt: skip
        return tuple(outputs)
