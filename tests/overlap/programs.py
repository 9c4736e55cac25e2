"""Small programs of the shape of a Mixture-of-Experts decoder: dummies for schedules, and tiny ones that run.

`Shape.kinds` says the layers, one letter each: M for a MoE layer, D for a dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.builder import ProgramBuilder, Value
from overlap.chunk import ModelChunk
from overlap.ir import Lane, Program, StageKey
from overlap.lanes import Lanes
from overlap.lower import Event, Key, Plan
from overlap.pieces import Piece
from overlap.plan import segments_of
from overlap.side import Side
from recompute import RecomputeConfig
from recompute.wgrad import weight_gradient

TOKENS, WIDTH, VOCAB = 6, 4, 5


@dataclass(frozen=True)
class Shape:
    """What a program looks like."""

    kinds: str = "MM"
    tied: bool = False
    shared: bool = False
    dropout: float = 0.0
    stateful: bool = False
    """Whether experts change a buffer in place."""
    plain_post: bool = False
    """Whether `post` goes without adjoint, so that its backward needs the combine output."""


@dataclass
class Weight:
    """A parameter of a dummy program."""

    requires_grad: bool = True


def nothing(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a dummy program is scheduled, never run")


@dataclass
class Parts:
    """What the stages of one layer (or of the chunk's ends) call, and read beside values."""

    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    state: Sequence[Tensor] = ()
    count: Callable[[Any], None] = nothing

    def call(self, name: str) -> Callable[..., Any]:
        return self.functions.get(name, nothing)

    def weights(self, name: str) -> Sequence[Any]:
        return self.parameters.get(name, ())


def add_layer(b: ProgramBuilder, shape: Shape, kind: str, hidden: Value, parts: Parts) -> Value:
    """Add the stages of one layer."""
    post = None if shape.plain_post else parts.call("post_adjoint")
    if kind == "D":
        residual, tokens = b.compute(
            "attn", parts.call("attn_dense"), hidden, outputs=("residual", "tokens"), wgrad=True,
            parameters=parts.weights("attn"), draws_rng=shape.dropout > 0,
        )  # fmt: skip
        (mixed,) = b.compute(
            "experts", parts.call("ffn"), tokens, outputs=("mixed",), wgrad=True, parameters=parts.weights("experts")
        )
        (out,) = b.compute("post", parts.call("post"), residual, mixed, outputs=("out",), adjoint=post)
        return out
    residual, tokens, probs, routing, _ = b.compute(
        "attn", parts.call("attn"), hidden, outputs=("residual", "tokens", "probs"), nondiff=("routing", "counts"),
        wgrad=True, pins=("routing",), effects=(("counts", parts.count),), draws_rng=shape.dropout > 0,
        parameters=parts.weights("attn"),
    )  # fmt: skip
    extra: tuple[Value, ...] = ()
    if shape.shared:
        extra = b.compute(
            "shared", parts.call("shared"), tokens, outputs=("extra",), parameters=parts.weights("shared")
        )
    sent, weights = b.comm(
        "dispatch", parts.call("dispatch"), tokens, probs, routing, outputs=("sent", "weights"),
        adjoint=parts.call("dispatch_adjoint"),
    )  # fmt: skip
    (done,) = b.compute(
        "experts", parts.call("experts"), sent, weights, outputs=("done",), wgrad=True,
        parameters=parts.weights("experts"), state=parts.state,
    )  # fmt: skip
    (mixed,) = b.comm(
        "combine", parts.call("combine"), done, routing, outputs=("mixed",), adjoint=parts.call("combine_adjoint")
    )
    (out,) = b.compute("post", parts.call("post"), residual, mixed, *extra, outputs=("out",), adjoint=post)
    return out


def add_ends(b: ProgramBuilder, shape: Shape, ends: Parts, layers: Sequence[Parts], shared: Any) -> Program:
    """Add `embed`, the layers and `head`; `shared` is the tied weight."""
    ids, target = b.input("ids"), b.input("target")
    tied = (b.parameter("tied", shared),) if shape.tied else ()
    (hidden,) = b.compute(
        "embed", ends.call("embed"), ids, *tied, outputs=("embedded",), parameters=ends.weights("embed")
    )
    for index, (kind, parts) in enumerate(zip(shape.kinds, layers, strict=True)):
        with b.layer(index):
            hidden = add_layer(b, shape, kind, hidden, parts)
    (loss,) = b.compute(
        "head", ends.call("head"), hidden, target, *tied, outputs=("loss",), wgrad=True,
        parameters=ends.weights("head"),
    )  # fmt: skip
    b.loss(loss)
    return b.build()


def dummy_program(kinds: str = "MM", *, frozen: int = 0, **shape: Any) -> Program:
    """A program to schedule; `embed` and the first `frozen` layers do not train."""

    def weights(*names: str, trains: bool = True) -> dict[str, list[Weight]]:
        return {name: [Weight(trains)] for name in names}

    whole = Shape(kinds, **shape)
    layers = [Parts(parameters=weights("attn", "shared", "experts", trains=i >= frozen)) for i in range(len(kinds))]
    if whole.tied:
        return add_ends(ProgramBuilder(), whole, Parts(), layers, Weight())
    ends = Parts(parameters={**weights("embed", trains=not frozen), **weights("head")})
    return add_ends(ProgramBuilder(), whole, ends, layers, None)


def side_of(program: Program, config: RecomputeConfig | None = None) -> Side:
    """The program as one microbatch runs it."""
    return Side(program, segments_of(program, config or RecomputeConfig.none()), program.trained())


class LateLinear(torch.autograd.Function):
    """x @ w whose weight gradient may be delayed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        return grads[0] @ w.T, weight_gradient(w, lambda a, g: a.T @ g, x, grads[0]) if wanted else None


def late_linear(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = LateLinear.apply(x, w)
    return result


class TinyLayer(nn.Module):
    """Real functions for the stages; routing is a permutation of the tokens by score."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.randn(WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.side = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("counts", torch.zeros((), dtype=torch.long))
        self.stateful = shape.stateful

    def attn_dense(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        residual = hidden + F.dropout(torch.tanh(late_linear(hidden, self.mix)), self.dropout, self.training)
        return residual, residual * residual.square().mean(-1, keepdim=True).add(1).rsqrt()

    def attn(self, hidden: Tensor, *, pinned: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        residual, tokens = self.attn_dense(hidden)
        scores = tokens @ self.gate
        routing = scores.detach().argsort() if pinned is None else pinned[0]
        return residual, tokens, torch.sigmoid(scores), routing, routing[: TOKENS // 2].sum()

    def shared(self, tokens: Tensor) -> Tensor:
        return tokens @ self.side

    def dispatch(self, tokens: Tensor, probs: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[routing], probs[routing]

    def dispatch_adjoint(self, grads: Sequence[Tensor | None], pinned: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        back = pinned[0].argsort()
        return *(None if g is None else g[back] for g in grads), None

    def experts(self, sent: Tensor, weights: Tensor) -> Tensor:
        scale = self.get_buffer("scale").clone()
        if self.stateful:
            self.get_buffer("scale").mul_(0.9).add_(sent.detach().abs().max(), alpha=0.1)
        return late_linear(F.silu(late_linear(sent, self.up) * scale), self.down) * weights[:, None]

    def ffn(self, tokens: Tensor) -> Tensor:
        return late_linear(F.silu(late_linear(tokens, self.up)), self.down)

    def combine(self, done: Tensor, routing: Tensor) -> Tensor:
        return done[routing.argsort()]

    def combine_adjoint(self, grads: Sequence[Tensor | None], pinned: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        return None if grads[0] is None else grads[0][pinned[0]], None

    def post(self, residual: Tensor, *mixed: Tensor) -> Tensor:
        return torch.stack((residual, *mixed)).sum(0)

    def post_adjoint(self, grads: Sequence[Tensor | None], _: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        return (grads[0],) * self.summands

    summands = 2

    def count(self, value: Tensor) -> None:
        self.get_buffer("counts").add_(value)

    def parts(self, shape: Shape, kind: str) -> Parts:
        self.summands = 2 + (shape.shared and kind == "M")
        names = [name for name in vars(TinyLayer) if not name.startswith("_")]
        attn = (self.mix, self.gate) if kind == "M" else (self.mix,)
        return Parts(
            functions={name: getattr(self, name) for name in names},
            parameters={"attn": attn, "experts": (self.up, self.down), "shared": (self.side,)},
            state=(self.get_buffer("scale"),) if shape.stateful else (),
            count=self.count,
        )


class TinyModel(nn.Module):
    """A model that runs in a fraction of a millisecond per stage."""

    def __init__(self, kinds: str = "MM", **shape: Any) -> None:
        super().__init__()
        self.shape = Shape(kinds, **shape)
        self.embedding = nn.Parameter(torch.randn(*((WIDTH, VOCAB) if self.shape.tied else (VOCAB, WIDTH))))
        self.unembedding = nn.Parameter(torch.randn(WIDTH, VOCAB))
        self.layers = nn.ModuleList(TinyLayer(self.shape) for _ in kinds)

    def program(self) -> Program:
        layers = [layer.parts(self.shape, kind) for layer, kind in zip(self._layers(), self.shape.kinds, strict=True)]
        own = {} if self.shape.tied else {"embed": (self.embedding,), "head": (self.unembedding,)}
        ends = Parts(functions={"embed": self.embed, "head": self.head}, parameters=own)
        return add_ends(ProgramBuilder(), self.shape, ends, layers, self.embedding)

    def _layers(self) -> list[TinyLayer]:
        return [layer for layer in self.layers if isinstance(layer, TinyLayer)]

    def embed(self, ids: Tensor, *tied: Tensor) -> Tensor:
        return F.embedding(ids, tied[0].T if tied else self.embedding)

    def head(self, hidden: Tensor, target: Tensor, *tied: Tensor) -> Tensor:
        logits = late_linear(hidden, tied[0] if tied else self.unembedding)
        return F.cross_entropy(logits, target)


def tiny_chunk(kinds: str = "MM", *, shape: Mapping[str, Any] | None = None, **settings: Any) -> ModelChunk:
    """A chunk over a tiny model, always with the same weights."""
    torch.manual_seed(7)
    return ModelChunk(TinyModel(kinds, **(shape or {})), **settings)


def tiny_feeds(microbatches: int) -> list[dict[str, Tensor]]:
    """Data for tiny models, always the same."""
    source = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return torch.randint(VOCAB, (TOKENS,), generator=source)

    return [{"ids": draw(), "target": draw()} for _ in range(microbatches)]


@dataclass
class FakeOwner:
    """A microbatch without tensors, for lanes that only look at names."""

    number: int
    values: dict[Key, Any]
    grads: dict[Piece, Any] = field(default_factory=dict)
    events: dict[Event, Any] = field(default_factory=dict)


def fake_owner(number: int, program: Program) -> FakeOwner:
    return FakeOwner(number, {(source.name, 0): None for source in program.inputs})


def drive(lanes: Lanes, plan: Plan, owners: Mapping[int, FakeOwner]) -> None:
    """Tell lanes what the engine would, without running anything."""
    for issue in plan.issues:
        owner = owners[issue.slot.microbatch]
        lanes.begin(issue, owner)
        event = lanes.end(issue, owner)
        if issue.signals:
            owner.events[issue.slot.op, issue.stage.key] = event


def result_of(chunk: ModelChunk) -> dict[str, Any]:
    """Everything a step leaves: gradients, buffers, random state."""
    return {
        **{f"grad {name}": p.grad for name, p in chunk.named_parameters()},
        **{f"buffer {name}": buffer.clone() for name, buffer in chunk.named_buffers()},
        "rng": torch.get_rng_state(),
    }


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Names whose bits differ; None and a zero gradient are different."""
    assert left.keys() == right.keys()
    return [name for name in left if not _same(left[name], right[name])]


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()


def label(key: StageKey) -> str:
    return key[1] if key[0] is None else f"{key[0]}.{key[1]}"


class Own(nn.Module):
    """A module whose program a test writes down: `build(module, builder)`."""

    def __init__(self, build: Callable[[Any, ProgramBuilder], Any], **members: Any) -> None:
        super().__init__()
        self.build = build
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def program(self) -> Program:
        b = ProgramBuilder()
        self.build(self, b)
        return b.build()


def staying(program: Program) -> Program:
    """The same where rows stay: what communication writes is the memory that it was given."""
    return replace(program, stages=tuple(replace(s, aliases=s.lane is Lane.COMM) for s in program.stages))
