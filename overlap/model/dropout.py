"""Dropout with the noise in the open, so that an adjoint can draw the very same noise again (R8)."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout_noise(like: Tensor, p: float) -> Tensor:
    """Draw a factor per element: 0 with probability `p`, else 1/(1-p).

    The noise depends on the generator state, the shape and the type of `like`, never on its strides: a gradient and
    the activation it belongs to may differ in layout.

    Args:
        like: Any shape, floating point.
        p: Drop probability in [0, 1).
    """
    noise = torch.empty_like(like, memory_format=torch.contiguous_format)
    return noise.bernoulli_(1 - p).div_(1 - p)


def dropout(x: Tensor, p: float, *, training: bool) -> Tensor:
    """Multiply with fresh noise in training; draws nothing when `p` is 0. It is its own adjoint."""
    return x * dropout_noise(x, p) if training and p > 0 else x
