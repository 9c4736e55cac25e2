"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], same type."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class NormThenLinear(nn.Module):
    """A norm and the one product that reads it; a backend may put what does both at once in its place.

    It holds neither: parameters stay where they are.
    """

    def forward(self, norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        result: Tensor = linear(norm(x))
        return result
