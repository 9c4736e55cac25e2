"""SharedEmbedding: an embedding that the first and the last virtual stage both read.

Each holds a copy and adds up its own uses; after the step, when replicas are in step, both get the sum of the two. On
one rank the copies share their memory, and only the first stage's is trained; sharded copies stay two, each trained by
the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.parallel.shards import laid_out, local
from overlap.pipelining.stage import Part

_NAME = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEmbedding:
    """The copies of the embedding on this rank."""

    first: nn.Parameter | None
    """The first stage's copy, if it is here and there are two."""
    last: nn.Parameter | None
    """The last stage's copy."""

    @classmethod
    def of(cls, parts: Sequence[Part]) -> SharedEmbedding:
        """The copies among the parts of a rank."""
        copies = {
            name: parameter
            for part in parts
            if part.split_embedding
            for name, parameter in part.named_parameters()
            if name in (_NAME, part.late_name)
        }
        first = copies.pop(_NAME, None)
        return cls(first=first, last=next(iter(copies.values()), None))

    @property
    def alias(self) -> nn.Parameter | None:
        """The copy that is none: it shares the other one's memory, on this rank."""
        if self.first is None or self.last is None or local(self.first) is not self.first:
            return None
        return self.last

    def join(self) -> None:
        """Let two copies on one rank share their memory; they still have a gradient each, until the step is over."""
        if self.first is not None and self.alias is not None:
            self.alias.data = self.first.data

    @contextmanager
    def apart(
        self, first_rank: int, last_rank: int, group: dist.ProcessGroup | None, *, after_others: bool = False
    ) -> Iterator[None]:
        """Add the two gradients of the step inside, on top of what was there before it.

        Args:
            first_rank: Rank of the first stage in the group.
            last_rank: Rank of the last stage.
            group: The pipeline's.
            after_others: What was there before belongs to the two gradients, which are to be added only now.
        """
        here = [copy for copy in (self.first, self.last) if copy is not None]
        before = [None if after_others else copy.grad for copy in here]
        for copy in () if after_others else here:
            copy.grad = None
        yield
        first, last = _gradient(self.first), _gradient(self.last)
        if self.first is None and self.last is not None:
            first = _exchange(self.last, first_rank, group)
        elif self.first is not None and self.last is None:
            last = _exchange(self.first, last_rank, group)
        total = _sum(first, last)
        for copy, earlier in zip(here, before, strict=True):
            # memory of its own for each copy: whoever scales gradients in place does it copy by copy
            own = None if total is None else laid_out(total if copy is here[0] else total.clone(), copy)
            copy.grad = None if copy is self.alias else _sum(earlier, own)


def _gradient(copy: nn.Parameter | None) -> Tensor | None:
    """What this rank holds of a copy's gradient."""
    return None if copy is None or copy.grad is None else local(copy.grad)


def _exchange(copy: nn.Parameter, peer: int, group: dist.ProcessGroup | None) -> Tensor | None:
    """The gradient of the copy that another rank holds; None if it has none."""
    has = torch.tensor([copy.grad is not None], dtype=torch.uint8, device=copy.device)
    theirs = torch.zeros_like(has)
    _swap(has, theirs, peer, group)
    own = _gradient(copy)
    gradient = torch.zeros_like(local(copy.detach())) if own is None else own.contiguous()
    arrived = torch.empty_like(gradient)
    _swap(gradient, arrived, peer, group)
    return arrived if theirs.item() else None


def _swap(mine: Tensor, theirs: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send and receive, the lower rank first: a batch of both would need all ranks of the group under NCCL."""
    if dist.get_rank(group) < peer:
        dist.send(mine, group=group, group_dst=peer)
        dist.recv(theirs, group=group, group_src=peer)
    else:
        dist.recv(theirs, group=group, group_src=peer)
        dist.send(mine, group=group, group_dst=peer)


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
