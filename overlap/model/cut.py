"""Cut: which part of a decoder a virtual stage of a pipeline holds, and Border: what it is joined to the others by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from overlap.ir import Lane
from recompute.config import check_bool, check_count
from recompute.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Consecutive decoder layers, with or without what stands before and after them.

    Raises:
        ConfigError: The layers are no range, or `opens` or `closes` no bool.
    """

    first: int
    """First decoder layer, by its number in the whole model."""
    end: int
    """One past the last decoder layer; equal to `first` for a part without decoder layers."""
    opens: bool
    """Whether it holds the embedding."""
    closes: bool
    """Whether it holds the MTP depths and the head."""

    def __post_init__(self) -> None:
        check_count("first", self.first, at_least=0)
        check_count("end", self.end, at_least=0)
        check_bool("opens", self.opens)
        check_bool("closes", self.closes)
        if self.first > self.end:
            rule = "must be a range of layers: first, end with 0 <= first <= end"
            raise ConfigError(field="cut", value=(self.first, self.end), rule=rule)

    @classmethod
    def whole(cls, layers: int) -> Cut:
        """The uncut model of that many decoder layers."""
        return cls(first=0, end=layers, opens=True, closes=True)

    @property
    def layers(self) -> range:
        """Its decoder layers."""
        return range(self.first, self.end)


@runtime_checkable
class Border(Protocol):
    """The two ends of a part: where the residual state comes from, and where it goes."""

    @property
    def lane_in(self) -> Lane:
        """Lane of the stage `recv`: P2P, or COMPUTE where the part before is on the same rank."""

    @property
    def lane_out(self) -> Lane:
        """Lane of the stage `send`."""

    def receive(self, arriving: Tensor) -> Tensor:
        """Stage `recv`: wait until the state has arrived."""

    def return_gradient(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[None]:
        """Adjoint of `recv`: hand the state's gradient to the part before."""

    def send(self, state: Tensor) -> tuple[()]:
        """Stage `send`: hand the state to the part after."""

    def await_gradient(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None]:
        """Adjoint of `send`: wait for the state's gradient from the part after."""


class NoBorder:
    """Both ends of an uncut model."""

    lane_in = lane_out = Lane.COMPUTE

    def receive(self, arriving: Tensor) -> Tensor:
        """Nothing arrives."""
        raise NotImplementedError

    def return_gradient(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[None]:
        """Nothing arrived."""
        raise NotImplementedError

    def send(self, state: Tensor) -> tuple[()]:
        """Nothing leaves."""
        raise NotImplementedError

    def await_gradient(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None]:
        """Nothing left."""
        raise NotImplementedError


NO_BORDER = NoBorder()
"""Of every uncut model."""
