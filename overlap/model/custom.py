"""The one typed door to torch.autograd.Function.apply, which torch leaves unannotated.

Without a graph the forward is called as it is: a first pass that keeps nothing pays for no context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _NoFlags:
    """No input needs a gradient, however many there are."""

    def __getitem__(self, place: int) -> bool:
        return False


class _Forgetful:
    """A Function's context where no backward follows: takes everything, keeps nothing that lives on."""

    needs_input_grad = _NoFlags()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Nobody will ask for them."""


def apply(function: type[Function], *args: object) -> Tensor:
    """Apply a Function with one output."""
    result: Tensor = _call(function, args)
    return result


def apply_many(function: type[Function], *args: object) -> tuple[Tensor, ...]:
    """Apply a Function with several outputs."""
    results: tuple[Tensor, ...] = _call(function, args)
    return results


def graph_is_kept() -> bool:
    """Whether the backward that runs leaves its graph for another one (`retain_graph`): what is saved must stay then.

    Where it does not, torch lets go of all that is saved, and refuses a second backward by itself.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _call(function: type[Function], args: tuple[object, ...]) -> Any:
    if torch.is_grad_enabled():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return function.forward(_Forgetful(), *args)
