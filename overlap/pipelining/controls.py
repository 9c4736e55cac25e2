"""Controls of a pipeline's verify: each breaks one thing on purpose, and verify must see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from overlap.controls import NoRng
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Stage
from overlap.lower import Issue
from overlap.transfers import SEND


class WrongGradient(Engine):
    """The gradient that arrives from the next stage belongs to other tokens, in one microbatch."""

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._backward(issue, owner)
        if issue.stage.name == SEND and owner.number == 0:
            for piece in issue.gives:
                if piece is not None:
                    owner.grads[piece] = owner.grads[piece].roll(1, 1)


class LocalSeeds(Engine):
    """Draws are seeded by a layer's number within its stage, not within the model."""

    def seed_of(self, stage: Stage, owner: MicrobatchState) -> int:
        """Seed of layer 0, whatever the layer."""
        return super().seed_of(replace(stage, layer=0), owner)


PIPELINE_CONTROLS: Mapping[str, Callable[..., Engine]] = MappingProxyType(
    {"no_rng": NoRng, "wrong_gradient": WrongGradient, "local_seeds": LocalSeeds}
)
"""Controls by the name that --control takes in a pipeline."""
