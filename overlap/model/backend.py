"""Backend: where a model's products, norms and attention come from.

A model is built with torch's; a backend then puts its own modules in their places, with the same parameters. What
the stages are, and what they declare, does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from overlap.ir import StepState

if TYPE_CHECKING:
    from overlap.model.decoder import Decoder

Context = Callable[[], AbstractContextManager[object]]


class Backend(Protocol):
    """Owns the precision of every stage too: there is one provider (R15)."""

    def convert(self, model: Decoder) -> Decoder:
        """Put this backend's modules in place, on the device where the model is, and return the model.

        Raises:
            ConfigError: The model's shape does not suit it.
        """

    def context(self, layer: int, layers: int) -> Context | None:
        """What every stage of a layer runs its forward in, replay included; from `layers` up they are MTP depths."""

    def step_states(self, model: Decoder) -> tuple[StepState, ...]:
        """What moves on once per step."""

    def check_feeds(self, feeds: Mapping[str, Any]) -> None:
        """Refuse a microbatch whose shape does not suit.

        Raises:
            ConfigError: Names the feed.
        """


class TorchBackend:
    """The model as it was built."""

    def convert(self, model: Decoder) -> Decoder:
        """Nothing to replace."""
        return model

    def context(self, layer: int, layers: int) -> Context | None:
        """The ambient precision."""
        return None

    def step_states(self, model: Decoder) -> tuple[StepState, ...]:
        """None."""
        return ()

    def check_feeds(self, feeds: Mapping[str, Any]) -> None:
        """Every shape will do."""
