"""Feed-forwards: one SwiGLU (dense or shared) and a group of them, one per expert (Shazeer, 2020).

Legend: N rows sorted by expert, C hidden, E experts, W inner width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from overlap.dispatch import Arrival, Routing
from overlap.model.graph_only import GraphOnly, gives_away, skips
from overlap.model.init import Sliced
from overlap.model.linear import Linear, grouped_linear
from overlap.model.swiglu import swiglu
from recompute.inner import rebuild
from recompute.modules import RecomputeModule


class SwiGLU(GraphOnly):
    """(silu(gate) * up) projected down."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * width)
        self.down = Linear(width, hidden)

    @property
    def skips(self) -> bool:
        """Whether the product that it ends with can be left out."""
        return super().skips and skips(self.down)

    def forward(self, x: Tensor, *, graph_only: bool = False) -> Tensor:
        """[..., C] -> [..., C]."""
        inner = swiglu(self.gate_up(x), consumes=gives_away(self.gate_up))
        result: Tensor = self.down(inner, graph_only=True) if self.leaves_out(graph_only) else self.down(inner)
        return result


def activate(dtype: torch.dtype, inner: Tensor, probs: Tensor) -> Tensor:
    """SwiGLU of [N, 2*W], each row weighted by `probs` [N]; [N, W] of `dtype`. Backward writes over `inner`."""
    return swiglu(inner, probs, consumes=True).to(dtype)


class GroupedExperts(Sliced, GraphOnly):
    """A SwiGLU per expert; each row is weighted before the second product, so that its output needs no activation.

    Args:
        experts: Of the layer, over all ranks.
        hidden: C.
        width: W.
        held: Those whose weights are here; None: all.
    """

    @property
    def sheds(self) -> tuple[int, ...]:
        """Places of forward's arguments that its graph does not hold."""
        return ()

    def __init__(self, experts: int, hidden: int, width: int, held: range | None = None) -> None:
        super().__init__(experts, range(experts) if held is None else held)
        self.gate_up = nn.Parameter(torch.empty(len(self.held), hidden, 2 * width))
        self.down = nn.Parameter(torch.empty(len(self.held), width, hidden))

    def forward(self, rows: Tensor, probs: Tensor, routing: Routing | Arrival, *, graph_only: bool = False) -> Tensor:
        """Apply each row's expert.

        Args:
            rows: [N, C], sorted by expert; N may be 0.
            probs: [N], float32 or wider.
            routing: Its ends delimit the experts that are held.
            graph_only: Leave the second product out.

        Returns:
            [N, C] of rows' type.
        """
        inner = grouped_linear(rows, self.gate_up, routing.ends, covers=routing.covers)
        weighted = rebuild(RecomputeModule.MOE_ACT, partial(activate, rows.dtype), inner, probs)
        left_out = self.leaves_out(graph_only)
        return grouped_linear(weighted, self.down, routing.ends, covers=routing.covers, graph_only=left_out)
