"""Feed-forwards: one SwiGLU (dense or shared) and a group of them, one per expert (Shazeer, 2020).

Legend: N rows sorted by expert, C hidden, E experts, W inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.dispatch import Routing
from overlap.model.linear import Linear, grouped_linear


class SwiGLU(nn.Module):
    """(silu(gate) * up) projected down."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * width)
        self.down = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


class GroupedExperts(nn.Module):
    """A SwiGLU per expert; each row is weighted before the second product, so that its output needs no activation."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, rows: Tensor, probs: Tensor, routing: Routing) -> Tensor:
        """Apply each row's expert.

        Args:
            rows: [N, C], sorted by expert; N may be 0.
            probs: [N], float32 or wider.
            routing: Its counts [E] delimit the experts.

        Returns:
            [N, C] of rows' type.
        """
        gate, up = grouped_linear(rows, self.gate_up, routing.counts, covers=routing.covers).chunk(2, -1)
        weighted = (F.silu(gate) * up * probs.unsqueeze(-1)).to(rows.dtype)
        return grouped_linear(weighted, self.down, routing.counts, covers=routing.covers)
