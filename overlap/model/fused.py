"""Which kernels of our own apply: on a CUDA device where Triton is installed, for real tensors of the usual types.

Everything else takes the composition of torch's own operations, which says what the kernels compute.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_TYPES = (torch.bfloat16, torch.float32)


def fused(x: Tensor) -> bool:
    """Whether kernels of our own take this tensor. Fake tensors and other subclasses they do not."""
    return x.is_cuda and x.dtype in _TYPES and type(x) is Tensor and _has_triton()


@cache
def kernels(name: str) -> Any:
    """The kernel module of that name."""
    return import_module(f"overlap.backends.{name}")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
