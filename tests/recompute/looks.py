"""Products whose backward shows what it is given, to see what is alive by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def doubled_twice(look: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    """Make x -> 4 x, by two nodes, each of which calls `look(its gradient)` first thing in backward."""

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            look(gradients[0])
            return gradients[0] * 2

    def twice(x: Tensor) -> Tensor:
        result: Tensor = Looks.apply(Looks.apply(x))
        return result

    return twice
