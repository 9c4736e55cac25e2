"""Clip gradients by their norm over all ranks: each element counts once, wherever it lies and however often."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.chunk import ModelChunk
from overlap.parallel.experts import expert_parameters
from overlap.parallel.world import World

_TINY = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm."""


def clip_gradients(chunk: ModelChunk, max_norm: float) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; the same factor on every rank. Collective.

    Args:
        chunk: Its gradients are reduced already.
        max_norm: Above 0.

    Returns:
        The norm before, a scalar.
    """
    if chunk.world.groups is None:
        return torch.nn.utils.clip_grad_norm_(chunk.parameters(), max_norm)
    return clip_together((chunk,), max_norm)


def clip_together(chunks: Sequence[ModelChunk], max_norm: float, again: Container[int] = ()) -> Tensor:
    """The same for chunks that are parts of one model.

    Args:
        chunks: Those of this rank.
        max_norm: Above 0.
        again: Parameters, by id, that the norm does not count: they stand for others that it does.

    Returns:
        The norm before, a scalar.
    """
    norm = global_norm(chunks, again).float()
    factor = (max_norm / (norm + _TINY)).clamp(max=1.0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.grad is not None:
                chunk.parallel.local(parameter.grad).mul_(factor)
    return norm


def global_norm(chunks: Sequence[ModelChunk], again: Container[int] = ()) -> Tensor:
    """The 2-norm of all gradients of the job, float32 or wider; see clip_together.

    Every rank gives the squares of what it holds, weighted by one over the ranks that hold the same.
    """
    world = chunks[0].world
    squares = torch.zeros((), dtype=torch.float64, device=world.device)
    for chunk in chunks:
        experts = expert_parameters(chunk.module)
        for parameter in chunk.parameters():
            if parameter.grad is not None and id(parameter) not in again:
                holders = world.layout.expert_data if id(parameter) in experts else world.layout.data
                held = chunk.parallel.local(parameter.grad)
                squares += _square(held) / (holders if held is parameter.grad else 1)
    for group in _groups(world):
        world.collectives.record("all_reduce", "gradient norm", squares)
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _square(gradient: Tensor) -> Tensor:
    # wide enough that how the elements are split over ranks does not show in the factor
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def _groups(world: World) -> Iterable[dist.ProcessGroup]:
    """Over which to add up: the ranks of a pipeline stage, then the stages."""
    if world.groups is None:
        return
    yield world.data_group
    if world.layout.pp > 1:
        yield world.formed.pp
