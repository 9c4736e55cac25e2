"""How the losses of a step's microbatches add up: the factor on every loss gradient.

The factor multiplies losses, never stored gradients, so that several calls before one optimizer step simply add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from recompute.checks import check_integer, check_kind
from recompute.config import check_count
from recompute.errors import ConfigError


@runtime_checkable
class LossScale(Protocol):
    """Gives a step's factor on the loss gradients. One that also says `per_token` is checked against the model."""

    def factor(self, microbatches: Sequence[Mapping[str, Any]], accumulate: int, total_tokens: int | None) -> float:
        """The factor.

        Args:
            microbatches: The feeds of this call.
            accumulate: Calls that make up one optimizer step.
            total_tokens: Tokens of all those calls, if the caller knows.
        """


@runtime_checkable
class ScalesSums(Protocol):
    """A loss scale that says what it is for."""

    @property
    def per_token(self) -> bool:
        """Whether it takes losses that are sums over tokens; or means."""


@runtime_checkable
class GivesSums(Protocol):
    """A model that says what its losses are."""

    @property
    def per_token_loss(self) -> bool:
        """Whether they are sums over tokens; or means."""


def check_scale(model: object, scale: LossScale) -> None:
    """Refuse a loss scale that is for the other kind of losses than the model's, as far as both say theirs.

    Raises:
        ConfigError: Names the scale.
    """
    if not isinstance(model, GivesSums) or not isinstance(scale, ScalesSums):
        return
    if scale.per_token and not model.per_token_loss:
        rule = "the model's losses are means (per_token_loss=False): take PerMicrobatch"
        raise ConfigError(field="loss_scale", value=scale, rule=rule)
    if model.per_token_loss and not scale.per_token:
        rule = "the model's losses are sums over tokens (per_token_loss=True): take PerToken"
        raise ConfigError(field="loss_scale", value=scale, rule=rule)


@dataclass(frozen=True, slots=True)
class PerMicrobatch:
    """Each microbatch's loss is a mean; the step's is the mean over all microbatches."""

    per_token: ClassVar[bool] = False

    def factor(self, microbatches: Sequence[Mapping[str, Any]], accumulate: int, total_tokens: int | None) -> float:
        """One over the microbatches of all calls."""
        if total_tokens is not None:
            rule = "only a per-token loss scale takes it"
            raise ConfigError(field="total_tokens", value=total_tokens, rule=rule)
        return 1.0 / (len(microbatches) * accumulate)


@dataclass(frozen=True, slots=True)
class PerToken:
    """Each microbatch's loss is a sum over tokens; the step's is the mean over all tokens."""

    per_token: ClassVar[bool] = True
    labels: str = "labels"
    """Name of the feed that holds the labels."""
    ignore_index: int = -100
    """Label of tokens that carry no loss."""

    def __post_init__(self) -> None:
        check_kind("labels", self.labels, str, "the name of a feed")
        check_integer("ignore_index", self.ignore_index)

    def factor(self, microbatches: Sequence[Mapping[str, Any]], accumulate: int, total_tokens: int | None) -> float:
        """One over the tokens of all calls; with one call they are counted here (at least 1).

        Raises:
            ConfigError: Several calls and no `total_tokens`; no feed of that name; a negative count.
        """
        return 1.0 / max(self.tokens(microbatches, accumulate, total_tokens), 1)

    def tokens(self, microbatches: Sequence[Mapping[str, Any]], accumulate: int, total_tokens: int | None) -> int:
        """The tokens of all calls; arguments and errors as factor's."""
        if total_tokens is None and accumulate > 1:
            rule = "a per-token loss over several train_step calls needs the tokens of all of them"
            raise ConfigError(field="total_tokens", value=None, rule=rule)
        if total_tokens is None:
            if any(self.labels not in mb for mb in microbatches):
                rule = f"must name a feed that holds the labels: one of {sorted(microbatches[0])}"
                raise ConfigError(field="labels", value=self.labels, rule=rule)
            # Added where the labels are: a look at each count would wait for the device once per microbatch.
            total_tokens = int(sum((mb[self.labels] != self.ignore_index).sum() for mb in microbatches))
        return check_count("total_tokens", total_tokens, at_least=0)
