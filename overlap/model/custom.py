"""The one typed door to torch.autograd.Function.apply, which torch leaves unannotated."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *args: object) -> Tensor:
    """Apply a Function with one output."""
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def apply_many(function: type[Function], *args: object) -> tuple[Tensor, ...]:
    """Apply a Function with several outputs."""
    results: tuple[Tensor, ...] = function.apply(*args)  # type: ignore[no-untyped-call]
    return results
