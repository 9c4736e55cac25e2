"""GraphOnly: modules that can leave their graph without computing what they return (ir.Stage.graph_only).

What a replay writes last is read by nobody: its backward needs what the last product saved, never its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks


class GraphOnly(nn.Module):
    """A module whose forward takes `graph_only`."""

    fresh: ClassVar[bool] = False
    """Whether what forward returns is new memory that nothing else, no saved tensor either, refers to.

    A class says so for itself; see gives_away().
    """

    @property
    def skips(self) -> bool:
        """Whether it does: a class or object that puts another forward in place may not."""
        return "graph_only" in signature(self.forward).parameters

    def leaves_out(self, graph_only: bool) -> bool:
        """Whether to leave the result out if nobody behind the module reads it: a forward hook would."""
        return graph_only and not self._forward_hooks and not _global_forward_hooks


def skips(module: nn.Module) -> bool:
    """Whether a module's forward takes `graph_only`."""
    return isinstance(module, GraphOnly) and module.skips


def gives_away(module: nn.Module) -> bool:
    """Whether what a module returns is its caller's alone, who may write over it.

    Not where a subclass or the object puts another forward in place, which may save it, nor where a hook sees it.
    """
    says_so = vars(type(module)).get("fresh", False) and "forward" not in vars(module)
    return isinstance(module, GraphOnly) and says_so and module.leaves_out(True)


def second_form(function: Callable[..., Any], last: nn.Module) -> Callable[..., Any] | None:
    """A stage function that leaves out what it returns, if the module that it ends with can."""
    return partial(function, graph_only=True) if skips(last) else None


def placeholder(like: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape, and of `like`'s type and device, in the memory of one element, or none if it is empty."""
    return torch.empty_strided(shape, (0,) * len(shape), dtype=like.dtype, device=like.device)
