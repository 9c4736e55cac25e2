"""M0 of the bug reports, and what their tests share: run a step, compare two runs, see what happens inside.

EQ means: every loss, gradient and buffer equal in every bit, key sets included, and the generator state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, Op, PerMicrobatch, PerToken, reference_step, train_step
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.lower import Issue
from overlap.model import Decoder, ModelConfig, Routed, Router
from overlap.verify import compare
from recompute import RecomputeConfig

U, B = RecomputeConfig.uniform, RecomputeConfig.block
NONE = RecomputeConfig.none()
SEQUENCES, TOKENS, VOCAB = 2, 8, 32
COPIES = SEQUENCES * TOKENS * 2
"""Token copies that one layer routes for one microbatch."""
FIRST = (Op.FORWARD, Op.NO_GRAD)
"""The ops of a first pass."""
Step = Callable[..., list[dict[str, Tensor]]]


def m0(**changes: Any) -> ModelConfig:
    """The tiny decoder."""
    shape: dict[str, Any] = {
        "layers": 4, "hidden": 16, "heads": 2, "vocab": VOCAB, "experts": 4, "topk": 2, "expert_width": 24,
        "aux_coefficient": 0.01, "expert_bias": True, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8,
        "ffn_width": 24,
    }  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def make_chunk(
    recompute: RecomputeConfig | Sequence[RecomputeConfig] = NONE,
    *,
    order: str = "multi_queue",
    delay_wgrad: bool = False,
    **changes: Any,
) -> ModelChunk:
    """M0 with changes, as a chunk."""
    model = Decoder(m0(**changes))
    scale = PerToken() if model.per_token_loss else PerMicrobatch()
    return ModelChunk(model, recompute=recompute, order=order, delay_wgrad=delay_wgrad, loss_scale=scale)


def make_feeds(count: int, seed: int = 0) -> list[Feeds]:
    """Random microbatches."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCAB, (count, 2, SEQUENCES, TOKENS), generator=generator)
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves."""

    losses: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    rng: Tensor


def outcome(chunk: ModelChunk, losses: Sequence[dict[str, Tensor]]) -> Outcome:
    """Copy what `chunk` holds after its steps."""
    return Outcome(
        losses={f"{number}.{name}": loss.clone() for number, mb in enumerate(losses) for name, loss in mb.items()},
        gradients={
            name: None if p.grad is None else p.grad.detach().clone() for name, p in chunk.module.named_parameters()
        },
        buffers={name: buffer.clone() for name, buffer in chunk.module.named_buffers()},
        rng=torch.get_rng_state(),
    )


def run(chunk: ModelChunk, microbatches: Sequence[Feeds], step: Step = train_step, **settings: Any) -> Outcome:
    """One step of a copy of `chunk`, from a fixed generator state."""
    chunk = copy.deepcopy(chunk)
    torch.manual_seed(7)
    return outcome(chunk, step(chunk, microbatches, **settings))


def different(expected: Outcome, found: Outcome) -> list[str]:
    """What differs, as `kind:name`; empty means EQ."""
    names = [
        f"{kind}:{name}"
        for kind in ("losses", "gradients", "buffers")
        for name in compare(getattr(expected, kind), getattr(found, kind)).different
    ]
    return names if torch.equal(expected.rng, found.rng) else [*names, "rng"]


def assert_equals_reference(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> Outcome:
    """EQ between the overlapped and the reference step; returns the outcome."""
    expected = run(chunk, microbatches, reference_step)
    assert different(expected, run(chunk, microbatches)) == []
    return expected


class Watcher:
    """Observer that knows the slot being run and logs all of them.

    Attributes:
        slot: (op, microbatch of the step, layer, stage) of the slot being run; None outside any.
        log: All slots in issue order.
    """

    def __init__(self, after: Callable[[Issue, MicrobatchState], None] | None = None) -> None:
        self.slot: tuple[Op, int, int | None, str] | None = None
        self.log: list[tuple[Op, int, int | None, str]] = []
        self._after = after

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        self.slot = (issue.slot.op, owner.number, issue.stage.layer, issue.stage.name)
        self.log.append(self.slot)

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        if self._after is not None:
            self._after(issue, owner)
        self.slot = None

    def replayed_layers(self, microbatch: int) -> list[int | None]:
        """Layers of which a microbatch replayed a stage."""
        return list(dict.fromkeys(slot[2] for slot in self.log if slot[:2] == (Op.REPLAY, microbatch)))


def routed_by_pass(
    monkeypatch: pytest.MonkeyPatch, chunk: ModelChunk, feeds: list[Feeds], **settings: Any
) -> dict[tuple[int, int | None, str], list[Routed]]:
    """What each router gave in a step, first pass then replay, by microbatch, layer and stage."""
    watcher = Watcher()
    found: dict[tuple[int, int | None, str], list[Routed]] = defaultdict(list)
    real = Router.forward

    def forward(self: Router, x: Tensor, pinned: Any = None) -> Routed:
        routed = real(self, x, pinned)
        if watcher.slot is not None:
            found[watcher.slot[1:]].append(routed)
        return routed

    monkeypatch.setattr(Router, "forward", forward)
    train_step(chunk, feeds, observers=(watcher,), **settings)
    return found


class Box:
    """Holds one saved tensor for the graph: the tensor lives as long as the box."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_tensors(seen: Callable[[Box], None]) -> Iterator[None]:
    """Call `seen` with every tensor that a graph saves inside."""

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        seen(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        yield


class UnpinnedReplay(Engine):
    """Control: replays choose their experts again."""

    def _replay_keywords(self, issue: Issue, owner: MicrobatchState) -> dict[str, Any]:
        return dict.fromkeys(super()._replay_keywords(issue, owner))
