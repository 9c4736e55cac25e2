"""Which layers are recomputed and how they are replayed: `RecomputeConfig`, checked in full when it is made.

Owns the settings and their rules. Which layers form which segment is segments, flag names are flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Self, TypeVar

from recompute.errors import ConfigError
from recompute.modules import STAGES_OF, RecomputeModule, parse_modules

Choice = TypeVar("Choice", bound=StrEnum)


class Granularity(StrEnum):
    """How much of a layer is recomputed."""

    NONE = "none"
    """Nothing: every activation is kept."""
    FULL = "full"
    """Whole layers: between forward and backward only the inputs of each segment are kept."""
    SELECTIVE = "selective"
    """Parts of layers, by name; whole layers too where a method is given."""


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


class Keep(StrEnum):
    """Where the inputs of segments wait for their replay."""

    DEVICE = "device"
    """Where they were made."""
    HOST = "host"
    """In host memory (pinned, on a GPU): copied out after the first pass, back one segment before the replay."""
    SHARDED = "sharded"
    """Cut over a group of ranks that all hold the same inputs, and gathered one segment before the replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """What to recompute; the default is nothing.

    The enum fields also take their text (`method="uniform"`) and hold the enum member afterwards. Two equal
    configs hash alike, so a config can be part of a cache key.

    Raises:
        ConfigError: A field breaks its rule. A setting that would have no effect is refused, not ignored.
    """

    granularity: Granularity = Granularity.NONE
    """`none`, `full` or `selective`."""
    method: Method | None = None
    """`uniform` or `block` with `full`; `block` or None with `selective`; None with `none`."""
    num_layers: int | None = None
    """Layers: the group size of `uniform`, the number of recomputed layers of `block`. At least 1. A number
    above the layers of a chunk is allowed and means all of them: chunks of one model differ in length."""
    recompute_mtp: bool = False
    """Recompute MTP depths under `block` too, each one a segment. `uniform` always does and refuses this."""
    replay: Replay = Replay.JUST_IN_TIME
    """When a segment is replayed."""
    modules: tuple[RecomputeModule, ...] = ()
    """What `selective` rebuilds, in every decoder layer or MTP depth that no segment of `method` covers. Also takes a
    list of names."""
    keep: Keep = Keep.DEVICE
    """Where the inputs of segments, of single rebuilt stages too, wait for their replay."""

    def __post_init__(self) -> None:
        """Turn text into enum members and check every rule."""
        granularity = parse_choice(Granularity, "granularity", self.granularity)
        replay = parse_choice(Replay, "replay", self.replay)
        # A frozen dataclass has no other way to normalise a field of its own.
        object.__setattr__(self, "granularity", granularity)
        object.__setattr__(self, "replay", replay)
        object.__setattr__(self, "modules", parse_modules(self.modules))
        object.__setattr__(self, "keep", parse_choice(Keep, "keep", self.keep))
        check_bool("recompute_mtp", self.recompute_mtp)
        _CHECKS[granularity](self)
        if self.keep is not Keep.DEVICE and self.method is None and not set(self.modules) & STAGES_OF.keys():
            rule = f"has no effect unless layers or whole stages ({', '.join(STAGES_OF)}) are recomputed"
            raise ConfigError(field="keep", value=self.keep.value, rule=rule)

    @classmethod
    def none(cls) -> Self:
        """Keep every activation."""
        return cls()

    @classmethod
    def uniform(cls, num_layers: int, *, replay: Replay = Replay.JUST_IN_TIME, keep: Keep = Keep.DEVICE) -> Self:
        """Recompute all layers, in groups of `num_layers`."""
        return cls(granularity=Granularity.FULL, method=Method.UNIFORM, num_layers=num_layers, replay=replay, keep=keep)

    @classmethod
    def block(
        cls,
        num_layers: int,
        *,
        recompute_mtp: bool = False,
        replay: Replay = Replay.JUST_IN_TIME,
        keep: Keep = Keep.DEVICE,
    ) -> Self:
        """Recompute the first `num_layers` decoder layers of each chunk, each on its own."""
        return cls(
            granularity=Granularity.FULL,
            method=Method.BLOCK,
            num_layers=num_layers,
            recompute_mtp=recompute_mtp,
            replay=replay,
            keep=keep,
        )

    @classmethod
    def selective(cls, *modules: str, keep: Keep = Keep.DEVICE) -> Self:
        """Rebuild the named modules in every layer."""
        return cls(granularity=Granularity.SELECTIVE, modules=parse_modules(modules), keep=keep)

    @property
    def enabled(self) -> bool:
        """Whether anything is recomputed."""
        return self.granularity is not Granularity.NONE

    def __str__(self) -> str:
        """Print as in tables: `none`, `uniform 2`, `block 3 + mtp`, `uniform 2 hidden`, `selective attn,moe_act`."""
        if not self.enabled:
            return "none"
        layers = "" if self.method is None else f"{self.method} {self.num_layers}"
        mtp = " + mtp" if self.recompute_mtp else ""
        hidden = " hidden" if self.replay is Replay.HIDDEN else ""
        kept = "" if self.keep is Keep.DEVICE else f" keep {self.keep}"
        modules = f"selective {','.join(self.modules)}" if self.modules else ""
        return f"{layers}{mtp}{hidden}{' + ' if layers and modules else ''}{modules}{kept}"

    def _check_full(self) -> None:
        """Check the fields that whole layers need."""
        if self.modules and self.granularity is Granularity.FULL:
            rule = "has no effect unless granularity is 'selective'"
            raise ConfigError(field="modules", value=_plain(self.modules), rule=rule)
        method = parse_choice(Method, "method", self.method)
        object.__setattr__(self, "method", method)
        check_count("num_layers", self.num_layers, at_least=1)
        if self.recompute_mtp and method is Method.UNIFORM:
            rule = "only 'block' takes it: 'uniform' recomputes every MTP depth already"
            raise ConfigError(field="recompute_mtp", value=True, rule=rule)

    def _check_selective(self) -> None:
        """Check the fields that parts of layers need."""
        if not self.modules:
            raise ConfigError(
                field="modules", value=self.modules, rule=f"must name at least one of {', '.join(RecomputeModule)}"
            )
        if self.method is None:
            self._refuse_all("has no effect without a method", ("num_layers", "recompute_mtp", "replay"))
            return
        self._check_full()
        if self.method is Method.UNIFORM:
            rule = "leaves no layer to the modules of 'selective': take 'block', or no method"
            raise ConfigError(field="method", value=self.method.value, rule=rule)

    def _check_none(self) -> None:
        """Refuse what would have no effect without recompute."""
        self._refuse_all(
            "has no effect unless granularity is 'full' or 'selective'",
            ("method", "num_layers", "recompute_mtp", "replay", "modules"),
        )

    def _refuse_all(self, rule: str, names: Sequence[str]) -> None:
        """Refuse the fields that are not at their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                raise ConfigError(field=name, value=_plain(value), rule=rule)


def _plain(value: object) -> object:
    """A setting as the user wrote it: text in place of enum members."""
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return value.value if isinstance(value, StrEnum) else value


_CHECKS: Mapping[Granularity, Callable[[RecomputeConfig], None]] = MappingProxyType(
    {
        Granularity.NONE: RecomputeConfig._check_none,
        Granularity.FULL: RecomputeConfig._check_full,
        Granularity.SELECTIVE: RecomputeConfig._check_selective,
    }
)


def parse_choice(kind: type[Choice], field: str, value: object) -> Choice:
    """Look a setting's text up among the members of an enum.

    Args:
        kind: The enum.
        field: Name of the setting, for the error.
        value: A member or its text.

    Raises:
        ConfigError: `value` is neither a member nor the text of one.
    """
    for member in kind:
        if member == value:
            return member
    *most, last = [repr(member.value) for member in kind]
    rule = f"must be {', '.join(most)} or {last}"
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
