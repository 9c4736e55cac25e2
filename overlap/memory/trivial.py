"""Trivial: a model whose stages do next to nothing, so that what is left is the engine's own work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder, Value
from overlap.ir import Program


class Trivial(nn.Module):
    """MoE-shaped layers: `attn` and `experts` multiply two scalars, the other stages hand on what they get.

    Args:
        layers: Their number.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2 * layers))

    def program(self) -> Program:
        """Input `hidden`, a scalar; loss `loss`."""
        b = ProgramBuilder()
        hidden = b.input("hidden")
        for layer in range(len(self.weights) // 2):
            with b.layer(layer):
                hidden = self._layer(b, layer, hidden)
        (loss,) = b.compute("head", torch.neg, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()

    def _layer(self, b: ProgramBuilder, layer: int, hidden: Value) -> Value:
        first, second = self.weights[2 * layer : 2 * layer + 2]
        (tokens,) = b.compute("attn", first.mul, hidden, outputs=("tokens",), parameters=(first,))
        (there,) = b.comm("dispatch", _same, tokens, outputs=("there",), adjoint=_same_adjoint)
        (rows,) = b.compute("experts", second.mul, there, outputs=("rows",), parameters=(second,))
        (back,) = b.comm("combine", _same, rows, outputs=("back",), adjoint=_same_adjoint)
        (out,) = b.compute("post", _first, back, hidden, outputs=("hidden",), adjoint=_post_adjoint)
        return out


def _same(value: Tensor) -> Tensor:
    return value


def _first(value: Tensor, residual: Tensor) -> Tensor:
    return value


def _same_adjoint(grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return (grads[0],)


def _post_adjoint(grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return (grads[0], None)
