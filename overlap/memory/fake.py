"""fake_chunk: a model chunk without data, made by the caller's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from overlap.chunk import ModelChunk, check_chunk


@contextmanager
def fake_chunk(build: Callable[[], ModelChunk]) -> Iterator[ModelChunk]:
    """A chunk whose tensors have no data, with zero gradients, and the fake mode that they live in.

    Args:
        build: Makes the chunk; must not look at the data of tensors.
    """
    with FakeTensorMode() as mode:
        with _casts(mode):
            chunk = build()
        check_chunk(chunk)
        zero_gradients(chunk)
        yield chunk


def zero_gradients(chunk: ModelChunk) -> None:
    """Give every trainable parameter a zero `.grad`, so that backward adds in place and allocates none."""
    for parameter in chunk.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


@contextmanager
def _casts(mode: FakeTensorMode) -> Iterator[None]:
    """Let `module.to()` change fake parameters.

    It swaps the old tensor with the new one, which torch refuses while anything refers to one of them weakly; the
    mode's memo of converted tensors always does.
    """
    original = torch.utils.swap_tensors

    def swap(one: Tensor, other: Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        original(one, other)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original
