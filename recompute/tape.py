"""Tape: one stage's autograd island. Detached leaves in, outputs out, backward on demand.

Owns the graph of a single stage. Holds graph edges, not output tensors: an output that no backward needs is freed
with its last reader, while the graph waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from recompute.handover import Cell, await_gradient, hand_over

NO_CELLS: Mapping[int, Cell] = {}


class Tape:
    """The graph of one call of `forward`."""

    __slots__ = ("_cells", "_edges", "leaves")

    def __init__(
        self, leaves: Sequence[Any], edges: Sequence[GradientEdge | None], cells: Mapping[int, Cell] = NO_CELLS
    ) -> None:
        self.leaves = leaves
        """The inputs as the graph sees them: detached, gradient-tracking where asked."""
        self._edges = edges
        self._cells = cells

    @classmethod
    def record(
        cls,
        forward: Callable[..., Any],
        inputs: Sequence[Any],
        tracked: Sequence[bool],
        differentiable: Sequence[bool],
        keywords: Mapping[str, Any],
        sheds: Sequence[int] = (),
    ) -> tuple[Tape, tuple[Any, ...]]:
        """Run `forward` with a graph.

        Args:
            forward: Returns the one output, or a tuple of them.
            inputs: Tensors, or any object where `tracked` is False.
            tracked: Which inputs need a gradient.
            differentiable: Which outputs carry one; its length is the number of outputs.
            keywords: Passed on to `forward`.
            sheds: Places of inputs that the tape does not hold: their memory goes with whoever else holds them, unless
                the graph does. No weights: one whose gradient is put off is found by its leaf. Such a tape takes over
                the gradients of its outputs too, see take_over().

        Returns:
            The tape, and the outputs detached from it (same storage).
        """
        leaves = [
            value.detach().requires_grad_() if track else value for value, track in zip(inputs, tracked, strict=True)
        ]
        # An input that needs no gradient is the caller's own.
        sheds = [place for place in sheds if tracked[place]]
        with torch.enable_grad():
            result = forward(*_given(leaves, sheds), **keywords)
        for place in sheds:
            _shed(leaves[place])
        outputs = result if len(differentiable) != 1 else (result,)
        edges: list[GradientEdge | None] = []
        values: list[Any] = []
        cells: dict[int, Cell] = {}
        for output, carries in zip(outputs, differentiable, strict=True):
            if carries and sheds and output.requires_grad:
                with torch.enable_grad():
                    output, cells[len(edges)] = await_gradient(output)
            if carries:
                edges.append(get_gradient_edge(output) if output.requires_grad else None)
                values.append(output.detach())
            else:
                edges.append(None)
                values.append(output)
        return cls(leaves, edges, cells), tuple(values)

    def take_over(self, gradients: list[Tensor | None]) -> None:
        """Take the gradients for backward() out of a list, which gets placeholders, if their memory is to go early."""
        for place, cell in self._cells.items():
            gradient = gradients[place]
            if gradient is not None:
                gradients[place] = hand_over(gradient, cell)

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Run backward; parameters accumulate into `.grad`, the inputs' gradients are then `leaf.grad`.

        Args:
            gradients: One per output; None where none arrived.
        """
        edges: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for edge, gradient in zip(self._edges, gradients, strict=True):
            if edge is not None and gradient is not None:
                edges.append(edge)
                seeds.append(gradient)
        if edges:
            torch.autograd.backward(edges, seeds)

    @property
    def edges(self) -> Sequence[GradientEdge | None]:
        """Where the graph of each output begins; None: it has none."""
        return self._edges

    def take_gradients(self, tracked: Sequence[bool]) -> list[Tensor | None]:
        """The inputs' gradients after `backward`, taken off the leaves."""
        gradients: list[Tensor | None] = []
        for leaf, track in zip(self.leaves, tracked, strict=True):
            gradients.append(leaf.grad if track else None)
            if track:
                leaf.grad = None
        return gradients


def _given(leaves: Sequence[Any], sheds: Sequence[int]) -> Sequence[Any]:
    """What forward gets: the leaves, or views of those that will be shed, which keep the memory if a graph does."""
    if not sheds:
        return leaves
    return [leaf.view_as(leaf) if place in sheds else leaf for place, leaf in enumerate(leaves)]


def _shed(leaf: Tensor) -> None:
    """Leave of a leaf what a gradient needs: that it is there, and its shape."""
    leaf.data = leaf.new_empty(()).expand(leaf.shape)
