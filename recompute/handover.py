"""Gradients that a graph takes over: held by nobody else, their memory goes when the first node has used them.

torch.autograd.backward holds the gradients that it is given until it returns. So a graph that is to let go of one
starts with a node that gets a placeholder of one element, and takes the gradient itself out of a cell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Cell = list[Tensor]
"""Holds a gradient from hand_over() to the graph's first node."""


def await_gradient(output: Tensor) -> tuple[Tensor, Cell]:
    """An output whose graph starts with such a node, and the node's cell."""
    cell: Cell = []
    wrapped: Tensor = _Takes.apply(output, cell)  # type: ignore[no-untyped-call]
    return wrapped, cell


def hand_over(gradient: Tensor, cell: Cell) -> Tensor:
    """Put a gradient into its cell; returns what to start backward with in its place."""
    cell.append(gradient)
    return torch.empty_strided(
        gradient.shape, (0,) * gradient.dim(), dtype=gradient.dtype, device=gradient.device
    )  # fmt: skip


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, cell: Cell) -> Tensor:
        ctx.cell = cell
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cell: Cell = ctx.cell
        return cell.pop() if cell else grad, None
