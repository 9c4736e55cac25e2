"""Buckets: gradients that are reduced together, in one flat buffer over one group of ranks.

Which parameters share a bucket follows from the program alone, never from the order in which gradients arrive, so
that an element is always added up in the same place of the same buffer: results are the same bit for bit, whatever
the schedule is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.ir import Program, StageKey

BUCKET_BYTES = 25 * 2**20
"""A bucket is closed when it holds this much; a single parameter may be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How a parameter's gradient is reduced: summed over `group`, then divided."""

    group: dist.ProcessGroup | None
    """None: this rank alone holds the parameter."""
    divide: int
    """The ranks whose losses have a part in it: all data ranks, for an expert too, whose gradient has collected the
    tokens of the ranks that it serves."""
    dtype: torch.dtype | None
    """Of the sum; None: the gradient's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together; all of one type."""

    parameters: tuple[nn.Parameter, ...]
    stages: frozenset[StageKey]
    """The stages that give them gradients."""
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class Pending:
    """A bucket under way."""

    bucket: Bucket
    flat: Tensor
    work: Any
    """torch.distributed's handle; None where there is nobody to wait for."""

    def finish(self) -> None:
        """Wait, divide, and hand each parameter its gradient."""
        if self.work is not None:
            self.work.wait()
        flat = self.flat.div_(self.bucket.reduction.divide).to(self.bucket.parameters[0].dtype)
        sizes = [parameter.numel() for parameter in self.bucket.parameters]
        for parameter, gradient in zip(self.bucket.parameters, torch.split(flat, sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


def make_buckets(
    program: Program, reduction_of: Callable[[nn.Parameter], Reduction | None], bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Put the trainable parameters of a program into buckets, last stage first, about as their gradients come.

    Args:
        program: The stages and their parameters.
        reduction_of: How a parameter's gradient is reduced; None: not at all.
        bucket_bytes: Bytes of gradients at which a bucket is closed.
    """
    done: list[Bucket] = []
    filling: dict[tuple[Reduction, torch.dtype], list[tuple[StageKey, nn.Parameter]]] = {}

    def close(kind: tuple[Reduction, torch.dtype]) -> None:
        members = filling.pop(kind)
        stages = frozenset(key for key, _ in members)
        done.append(Bucket(parameters=tuple(p for _, p in members), stages=stages, reduction=kind[0]))

    for stage in reversed(program.stages):
        for parameter in cast("Iterable[nn.Parameter]", stage.parameters):
            reduction = reduction_of(parameter) if parameter.requires_grad else None
            if reduction is None:
                continue
            kind = (reduction, parameter.dtype)
            members = filling.setdefault(kind, [])
            members.append((stage.key, parameter))
            if sum(p.numel() * p.element_size() for _, p in members) >= bucket_bytes:
                close(kind)
    for kind in list(filling):
        close(kind)
    return tuple(done)


def undo_division(bucket: Bucket) -> None:
    """Scale gradients that are there, equal on the ranks that are summed over, so that a reduction gives them again."""
    group = bucket.reduction.group
    too_much = bucket.reduction.divide // (1 if group is None else group.size())
    for parameter in bucket.parameters if too_much > 1 else ():
        if parameter.grad is not None:
            parameter.grad.mul_(too_much)


def start_reduction(bucket: Bucket) -> Pending:
    """Begin to reduce a bucket on the current stream.

    A parameter without gradient takes part with zeros and ends with one: what a rank sends never depends on its data.
    """
    first = bucket.parameters[0]
    sizes = [parameter.numel() for parameter in bucket.parameters]
    flat = torch.empty(sum(sizes), dtype=bucket.reduction.dtype or first.dtype, device=first.device)
    with torch.no_grad():
        for parameter, part in zip(bucket.parameters, torch.split(flat, sizes), strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.view_as(parameter).copy_(parameter.grad)
                parameter.grad = None
    group = bucket.reduction.group
    work = None if group is None else dist.all_reduce(flat, group=group, async_op=True)
    return Pending(bucket, flat, work)
