"""GraphOnly: modules that can leave their graph without computing what they return (ir.Stage.graph_only).

What a replay writes last is read by nobody: its backward needs what the last product saved, never its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks


class GraphOnly(nn.Module):
    """A module whose forward takes `graph_only`."""

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


def second_form(function: Callable[..., Any], last: nn.Module) -> Callable[..., Any] | None:
    """A stage function that leaves out what it returns, if the module that it ends with can."""
    return partial(function, graph_only=True) if skips(last) else None


def placeholder(like: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape, and of `like`'s type and device, in the memory of one element, or none if it is empty."""
    return torch.empty_strided(shape, (0,) * len(shape), dtype=like.dtype, device=like.device)
