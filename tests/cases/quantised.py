"""Stand-ins for low precision that run on a CPU: experts whose input is rounded to a grid, as a cast to 8 bits does.

The grid follows the data in one of the ways that the field knows: a scale that moves with every forward, a history of
maxima, or scales that move once per step. `Region` is the process-wide switch, with a flag for the first module inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlap.dispatch import Arrival, Routing
from overlap.ir import StepState
from overlap.model import Decoder, GroupedExperts
from overlap.model.backend import Context
from overlap.model.in_place import ChangesInPlace

HISTORY = 4
GRID = 8.0
"""Steps of the grid from zero to the scale."""


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        # A copy: the scale moves before backward comes.
        ctx.save_for_backward(scale.clone())
        return (x / scale * GRID).round() * (scale / GRID)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return (gradients[0] / scale * GRID).round() * (scale / GRID), None


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """`x` on a grid of `scale`, its gradient too."""
    result: Tensor = _Round.apply(x, scale)
    return result


class RoundedExperts(ChangesInPlace):
    """Experts that read their rows on a grid.

    Attributes:
        seen: (slot or None, scale) of every forward.
    """

    scale: Tensor
    sheds: tuple[int, ...] = ()

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer("scale", torch.ones(()))
        self.seen: list[Tensor] = []

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.scale,)

    def forward(self, rows: Tensor, probs: Tensor, routing: Routing | Arrival) -> Tensor:
        self.seen.append(self.scale.clone())
        result: Tensor = self.experts(rounded(rows, self.scale), probs, routing)
        self.move(rows.detach().abs().max())
        return result

    @torch.no_grad()
    def move(self, amax: Tensor) -> None:
        """Row 6: the scale follows every forward."""
        self.scale.copy_(0.9 * self.scale + 0.1 * amax)


class HistoryExperts(RoundedExperts):
    """Row 10: every forward pushes its maximum; the scale is the largest of the last few."""

    history: Tensor
    pushes: Tensor

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__(experts)
        self.register_buffer("history", torch.zeros(HISTORY))
        self.register_buffer("pushes", torch.zeros((), dtype=torch.int64))

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.scale, self.history, self.pushes)

    @torch.no_grad()
    def move(self, amax: Tensor) -> None:
        self.history.copy_(self.history.roll(1))
        self.history[0] = amax
        self.scale.copy_(self.history.max())
        self.pushes += 1


class StepExperts(RoundedExperts):
    """The scale is constant within a step; forwards take a running maximum, which one push per step ends."""

    history: Tensor
    amax: Tensor

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__(experts)
        self.register_buffer("history", torch.zeros(HISTORY))
        self.register_buffer("amax", torch.zeros(()))

    @property
    def state(self) -> tuple[Tensor, ...]:
        return ()

    @torch.no_grad()
    def move(self, amax: Tensor) -> None:
        self.amax.copy_(torch.maximum(self.amax, amax))

    @torch.no_grad()
    def advance(self) -> None:
        self.history.copy_(self.history.roll(1))
        self.history[0] = self.amax
        self.scale.copy_(self.history.max())
        self.amax.zero_()


@dataclass(eq=False)
class Region:
    """The process-wide switch of low precision."""

    on: bool = False
    first: bool = False
    """Whether no module ran in this region yet."""
    log: list[tuple[bool, bool, bool]] = field(default_factory=list)
    """(on, first in its region, with a graph) of every forward."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = (self.on, self.first)
        self.on, self.first = True, True
        try:
            yield
        finally:
            self.on, self.first = before

    def enter_module(self) -> bool:
        """Whether a module that runs now computes in low precision."""
        self.log.append((self.on, self.first, torch.is_grad_enabled()))
        self.first = False
        return self.on


class RegionExperts(nn.Module):
    """Row 8: experts that round only inside the region."""

    sheds: tuple[int, ...] = ()

    def __init__(self, experts: GroupedExperts, region: Region) -> None:
        super().__init__()
        self.experts = experts
        self.region = region

    def forward(self, rows: Tensor, probs: Tensor, routing: Routing | Arrival) -> Tensor:
        if self.region.enter_module():
            rows = rounded(rows, torch.tensor(1.0))
        result: Tensor = self.experts(rows, probs, routing)
        return result


class StandInBackend:
    """A backend that puts stand-ins in the experts' places.

    Args:
        make: Makes a stand-in from experts.
        region: Entered by every layer's stages, if there is one.
        leave_out: A layer that stays outside the region.
    """

    def __init__(self, make: Any, region: Region | None = None, leave_out: int | None = None) -> None:
        self._make = make
        self._region = region
        self._leave_out = leave_out

    def convert(self, model: Decoder) -> Decoder:
        for layer in [*model.layers, *(depth.layer for depth in model.mtp)]:
            layer.experts = self._make(layer.experts)
        model.backend = self
        return model

    def context(self, layer: int, layers: int) -> Context | None:
        return None if self._region is None or layer == self._leave_out else self._region.entered

    def step_states(self, model: Decoder) -> tuple[StepState, ...]:
        moving = [module for module in model.modules() if isinstance(module, StepExperts)]
        return tuple(StepState(buffers=(module.amax,), advance=module.advance) for module in moving)

    def check_feeds(self, feeds: Mapping[str, Any]) -> None:
        return


def region_backend(region: Region, leave_out: int | None = None) -> StandInBackend:
    """Experts that round inside `region`."""
    return StandInBackend(partial(RegionExperts, region=region), region, leave_out)
