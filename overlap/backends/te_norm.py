"""RMSNorm: forward by torch's operator, backward by Transformer Engine's kernel.

Backward takes the device less than half of torch's time by it. Forward, which a replay repeats, takes the device as
long either way, and by Transformer Engine the host many times that: 0.11 ms a call for 0.007, seen on a slow host.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from overlap.model.custom import apply
from overlap.model.linear import autocast_like


class TENorm(nn.Module):
    """In the place of model.norm.RMSNorm.

    Args:
        weight: Its parameter, [width].
        eps: Added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], same type."""
        return apply(_RMSNorm, x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = autocast_like(x).contiguous()
        # What F.rms_norm calls, for what it keeps for its own backward: 1 / root of the mean square, [..., 1], float32.
        y, scale = torch._fused_rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        ctx.save_for_backward(x, scale, weight)
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        rows = x.view(-1, x.shape[-1])
        grad_rows, grad_weight = tex.rmsnorm_bwd(
            grad.to(x.dtype).contiguous().view_as(rows), rows, scale.view(-1), weight.to(x.dtype), 0, False
        )
        return grad_rows.view_as(x), grad_weight.view_as(weight), None
