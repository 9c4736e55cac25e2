"""Which kernels of our own apply: on a CUDA device where Triton is installed, for real tensors of the usual types.

Everything else takes the composition of torch's own operations, which says what the kernels compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_TYPES = (torch.bfloat16, torch.float32)
_without_work = 0
"""How many `kernels_without_work()` are open."""


def fused(x: Tensor) -> bool:
    """Whether kernels of our own take this tensor. Fake tensors (see below) and other subclasses they do not."""
    if _without_work:
        return type(x) is FakeTensor and x.dtype in _TYPES
    return x.is_cuda and x.dtype in _TYPES and type(x) is Tensor and _has_triton()


def kernels(name: str) -> Any:
    """The kernel module of that name."""
    return _Idle() if _without_work else _module(name)


def contiguous(x: Tensor | None) -> Tensor | None:
    """As kernels read it that take no strides."""
    return None if x is None else x.contiguous()


@contextmanager
def kernels_without_work() -> Iterator[None]:
    """Let fake tensors take the kernels' paths, which make and keep what they would on a device, and run no kernel."""
    global _without_work
    _without_work += 1
    try:
        yield
    finally:
        _without_work -= 1


class _Idle:
    """Stands for any kernel module: kernels write to tensors that they are given, and fake ones hold nothing."""

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*args: object) -> None:
    """No kernel."""


@cache
def _module(name: str) -> Any:
    return import_module(f"overlap.backends.{name}")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
