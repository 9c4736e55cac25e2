"""SharedEmbedding: an embedding that the first and the last virtual stage both read.

Each holds a copy and adds up its own uses; after the step both get the sum of the two. On one rank the copies share
their memory, and the last stage's is no parameter for an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.pipelining.pipeline import Pipeline

_NAME = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEmbedding:
    """The copies of the embedding on this rank."""

    pipeline: Pipeline
    first: nn.Parameter | None
    """The first stage's copy, if it is here and there are two."""
    last: nn.Parameter | None
    """The last stage's copy."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> SharedEmbedding:
        """The copies that a pipeline's rank holds."""
        split = any(stage.part.split_embedding for stage in pipeline.stages)
        named = pipeline.named_parameters() if split else {}
        late = next(stage.part.late_name for stage in pipeline.stages)
        return cls(pipeline=pipeline, first=named.get(_NAME), last=named.get(late))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Add the two gradients of the step inside, on top of what was there before it."""
        here = [copy for copy in (self.first, self.last) if copy is not None]
        before = [copy.grad for copy in here]
        for copy in here:
            copy.grad = None
        yield
        total = self._total()
        for copy, earlier in zip(here, before, strict=True):
            copy.grad = _sum(earlier, total)

    def _total(self) -> Tensor | None:
        if self.first is not None and self.last is not None:
            return _sum(self.first.grad, self.last.grad)
        if self.first is not None:
            return _sum(self.first.grad, self._exchange(self.first, self.pipeline.layout.num_stages - 1))
        if self.last is not None:
            return _sum(self._exchange(self.last, 0), self.last.grad)
        return None

    def _exchange(self, copy: nn.Parameter, stage: int) -> Tensor | None:
        """The gradient of the copy that another stage holds; None if it has none."""
        peer, group = self.pipeline.layout.rank_of(stage), self.pipeline.group
        has = torch.tensor([copy.grad is not None], dtype=torch.uint8, device=copy.device)
        theirs = torch.zeros_like(has)
        _swap(has, theirs, peer, group)
        gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad.contiguous()
        arrived = torch.empty_like(gradient)
        _swap(gradient, arrived, peer, group)
        return arrived if theirs.item() else None


def _swap(mine: Tensor, theirs: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send and receive at once."""
    ops = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
