"""A weight's AccumulateGrad node: whether anybody may have put a hook on it, and running it without a gradient.

Such a hook (torch's data parallelism, bucketed reducers) lives in the node, not in the weight, and Python cannot ask
for it. But a weight does not hold its node: a node that lives on between two looks is held by somebody else, and one
that nobody holds has no hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_MARK = "looked at"


def node_is_held(weight: Tensor) -> bool:
    """Whether anything outside the weight, in Python or not, keeps its AccumulateGrad node: a hook's owner, or a graph.

    Args:
        weight: A leaf that needs a gradient.
    """
    _notes(weight)[_MARK] = True
    return bool(_notes(weight).pop(_MARK, False))


def _notes(weight: Tensor) -> dict[str, Any]:
    """What Python may keep in the node, for as long as it lives."""
    node: Any = get_gradient_edge(weight).node
    notes: dict[str, Any] = node.metadata
    return notes


class _Reach(torch.autograd.Function):
    """A graph that reaches a weight and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Nothing, on the host: its gradient costs the device no kernel."""
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Nothing."""
        return


def run_node(weight: Tensor) -> None:
    """Call the hooks of a weight's AccumulateGrad node, as a backward does that added to `.grad` by itself.

    Hooks are given None for the gradient, as there. While a CUDA graph is recorded nothing is called: hooks would run
    once, and never again.
    """
    if weight.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return
        # Without a gradient autograd does not make a hook's stream, that of the node's making, wait for this one.
        torch.cuda.default_stream(weight.device).wait_stream(torch.cuda.current_stream(weight.device))
    with torch.enable_grad():
        reach: Tensor = _Reach.apply(weight)  # type: ignore[no-untyped-call]  # torch's
    torch.autograd.backward((reach,), (reach.detach(),))
