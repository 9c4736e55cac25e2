"""Which layers are recomputed and how they are replayed: `RecomputeConfig`, checked in full when it is made.

Owns the settings and their rules. Which layers form which segment is segments, flag names are flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Self, TypeVar

from recompute.errors import ConfigError

Choice = TypeVar("Choice", bound=StrEnum)


class Granularity(StrEnum):
    """How much of a layer is recomputed."""

    NONE = "none"
    """Nothing: every activation is kept."""
    FULL = "full"
    """Whole layers: between forward and backward only the inputs of each segment are kept."""


class Method(StrEnum):
    """How layers are grouped into segments (DESIGN R1)."""

    UNIFORM = "uniform"
    """All layers, in groups of `num_layers`."""
    BLOCK = "block"
    """The first `num_layers` decoder layers of each model chunk, one segment each; the rest is kept."""


class Replay(StrEnum):
    """When a segment is replayed (DESIGN R10)."""

    JUST_IN_TIME = "just_in_time"
    """Right before the segment's backward: one segment is live at a time."""
    HIDDEN = "hidden"
    """Behind the backward of the layers before, so that its all-to-all overlaps: two segments are live at a time."""


_NOTHING_COMES_LATER: Mapping[str, str] = MappingProxyType({})
_GRANULARITY_LATER: Mapping[str, str] = MappingProxyType({"selective": "recompute inside layers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """What to recompute; the default is nothing.

    The enum fields also take their text (`method="uniform"`) and hold the enum member afterwards. Two equal
    configs hash alike, so a config can be part of a cache key.

    Raises:
        ConfigError: A field breaks its rule. A setting that would have no effect is refused, not ignored.
    """

    granularity: Granularity = Granularity.NONE
    """`none` or `full`."""
    method: Method | None = None
    """`uniform` or `block` with `full`; None with `none`."""
    num_layers: int | None = None
    """Layers: the group size of `uniform`, the number of recomputed layers of `block`. At least 1. A number
    above the layers of a chunk is allowed and means all of them: chunks of one model differ in length."""
    recompute_mtp: bool = False
    """Recompute MTP depths under `block` too, each one a segment. `uniform` always does and refuses this."""
    replay: Replay = Replay.JUST_IN_TIME
    """When a segment is replayed."""

    def __post_init__(self) -> None:
        """Turn text into enum members and check every rule."""
        granularity = parse_choice(Granularity, "granularity", self.granularity, _GRANULARITY_LATER)
        replay = parse_choice(Replay, "replay", self.replay, _NOTHING_COMES_LATER)
        # A frozen dataclass has no other way to normalise a field of its own.
        object.__setattr__(self, "granularity", granularity)
        object.__setattr__(self, "replay", replay)
        check_bool("recompute_mtp", self.recompute_mtp)
        if granularity is Granularity.FULL:
            self._check_full()
        else:
            self._check_none()

    @classmethod
    def none(cls) -> Self:
        """Keep every activation."""
        return cls()

    @classmethod
    def uniform(cls, num_layers: int, *, replay: Replay = Replay.JUST_IN_TIME) -> Self:
        """Recompute all layers, in groups of `num_layers`."""
        return cls(granularity=Granularity.FULL, method=Method.UNIFORM, num_layers=num_layers, replay=replay)

    @classmethod
    def block(cls, num_layers: int, *, recompute_mtp: bool = False, replay: Replay = Replay.JUST_IN_TIME) -> Self:
        """Recompute the first `num_layers` decoder layers of each chunk, each on its own."""
        return cls(
            granularity=Granularity.FULL,
            method=Method.BLOCK,
            num_layers=num_layers,
            recompute_mtp=recompute_mtp,
            replay=replay,
        )

    @property
    def enabled(self) -> bool:
        """Whether anything is recomputed."""
        return self.granularity is Granularity.FULL

    def __str__(self) -> str:
        """Print as in tables: `none`, `uniform 2`, `block 3`, `block 3 + mtp`, `uniform 2 hidden`."""
        if not self.enabled:
            return "none"
        hidden = " hidden" if self.replay is Replay.HIDDEN else ""
        return f"{self.method} {self.num_layers}{' + mtp' if self.recompute_mtp else ''}{hidden}"

    def _check_full(self) -> None:
        """Check the fields that `full` needs."""
        method = parse_choice(Method, "method", self.method, _NOTHING_COMES_LATER)
        object.__setattr__(self, "method", method)
        check_count("num_layers", self.num_layers, at_least=1)
        if self.recompute_mtp and method is Method.UNIFORM:
            rule = "only 'block' takes it: 'uniform' recomputes every MTP depth already"
            raise ConfigError(field="recompute_mtp", value=True, rule=rule)

    def _check_none(self) -> None:
        """Refuse what would have no effect without recompute."""
        given = {
            "method": self.method,
            "num_layers": self.num_layers,
            "recompute_mtp": self.recompute_mtp or None,
            "replay": None if self.replay is Replay.JUST_IN_TIME else self.replay.value,
        }
        for field, value in given.items():
            if value is not None:
                raise ConfigError(field=field, value=value, rule="has no effect unless granularity is 'full'")


def parse_choice(kind: type[Choice], field: str, value: object, later: Mapping[str, str]) -> Choice:
    """Look a setting's text up among the members of an enum.

    Args:
        kind: The enum.
        field: Name of the setting, for the error.
        value: A member or its text.
        later: Known texts that are not built yet, each with what it would do.

    Raises:
        ConfigError: `value` is neither a member nor the text of one.
    """
    for member in kind:
        if member == value:
            return member
    rule = f"must be {' or '.join(repr(member.value) for member in kind)}"
    text = str(value)
    if text in later:
        rule = f"{later[text]} is not available yet; {rule}"
    raise ConfigError(field=field, value=value, rule=rule)


def check_count(field: str, value: object, *, at_least: int) -> int:
    """Return `value` if it is an integer of at least `at_least`.

    Raises:
        ConfigError: It is smaller, or no integer. A bool is none: `num_layers=True` is a mistake, not 1.
    """
    if type(value) is not int or value < at_least:
        raise ConfigError(field=field, value=value, rule=f"must be an integer of at least {at_least}")
    return value


def check_bool(field: str, value: object) -> bool:
    """Return `value` if it is True or False.

    Raises:
        ConfigError: It is anything else. The text 'false' would otherwise count as true.
    """
    if type(value) is not bool:
        raise ConfigError(field=field, value=value, rule="must be True or False")
    return value
