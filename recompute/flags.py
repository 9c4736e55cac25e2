"""Settings under the flag names that training scripts use: `read_flags` turns them into checked settings.

Owns the names and the rules between flags. The rules of recompute itself are config's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from recompute.checks import check_kind
from recompute.config import RecomputeConfig, Replay, check_bool, check_count
from recompute.errors import ConfigError

_FLAG_OF_FIELD: Mapping[str, str] = MappingProxyType(
    {
        "granularity": "recompute_granularity",
        "method": "recompute_method",
        "num_layers": "recompute_num_layers",
        "recompute_mtp": "recompute_mtp",
        "replay": "recompute_replay",
        "modules": "recompute_modules",
        "keep": "recompute_keep",
    }
)
"""Field of `RecomputeConfig` -> flag that sets it."""

_OVERLAP = "overlap_moe_expert_parallel_comm"
_DELAY_WGRAD = "delay_wgrad_compute"
_MTP_LAYERS = "mtp_num_layers"

FLAG_NAMES: tuple[str, ...] = (*_FLAG_OF_FIELD.values(), _OVERLAP, _DELAY_WGRAD, _MTP_LAYERS)
"""Every flag that `read_flags` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSettings:
    """The settings read from flags."""

    recompute: RecomputeConfig
    """What to recompute."""
    overlap: bool
    """Overlap the expert all-to-all of one microbatch with the compute of another."""
    delay_wgrad: bool
    """Compute weight gradients in slots of their own."""
    mtp_num_layers: int
    """Multi-token prediction depths; 0 for none."""


def read_flags(flags: Mapping[str, object] | Namespace) -> FlagSettings:
    """Read and check settings from flags; a flag that is left out has its default (off).

    Args:
        flags: Flag name -> value, as a mapping or as parsed by argparse; names are those of `FLAG_NAMES`.
            None, which argparse gives an option that was not set, means "not set" for every flag but the
            switches (True or False).

    Returns:
        The settings. None of the flags given is dropped on the way.

    Raises:
        ConfigError: A name is unknown, or a value breaks a rule; names the flag.
    """
    given: Mapping[str, object] = vars(flags) if isinstance(flags, Namespace) else flags
    check_kind("flags", given, Mapping, "a mapping from names to values, or an argparse.Namespace")
    for name, value in given.items():
        if name not in FLAG_NAMES:
            rule = f"is not a known flag; known are {', '.join(FLAG_NAMES)}"
            raise ConfigError(field=str(name), value=value, rule=rule)
    settings = FlagSettings(
        recompute=_read_recompute(given),
        overlap=check_bool(_OVERLAP, given.get(_OVERLAP, False)),
        delay_wgrad=check_bool(_DELAY_WGRAD, given.get(_DELAY_WGRAD, False)),
        mtp_num_layers=_read_mtp_layers(given),
    )
    if settings.delay_wgrad and not settings.overlap:
        raise ConfigError(field=_DELAY_WGRAD, value=True, rule=f"has no effect unless {_OVERLAP} is set")
    if settings.recompute.replay is Replay.HIDDEN and not settings.overlap:
        field = _FLAG_OF_FIELD["replay"]
        raise ConfigError(field=field, value=Replay.HIDDEN.value, rule=f"has no effect unless {_OVERLAP} is set")
    if settings.recompute.recompute_mtp and not settings.mtp_num_layers:
        raise ConfigError(field="recompute_mtp", value=True, rule=f"has no effect unless {_MTP_LAYERS} is set")
    return settings


def _read_recompute(given: Mapping[str, object]) -> RecomputeConfig:
    """Make the config, and name the flag instead of the field where it refuses a value."""
    # Values of any type go in: the config itself is what checks them.
    fields: dict[str, Any] = {name: given[flag] for name, flag in _FLAG_OF_FIELD.items() if flag in given}
    for name in ("granularity", "replay", "modules", "keep"):
        if fields.get(name, ...) is None:
            del fields[name]  # argparse's "not set": the config's default applies
    try:
        return RecomputeConfig(**fields)
    except ConfigError as error:
        flag = _FLAG_OF_FIELD[error.field]
        raise ConfigError(field=flag, value=error.value, rule=error.rule) from None


def _read_mtp_layers(given: Mapping[str, object]) -> int:
    """Return the number of MTP depths; not set means none."""
    value = given.get(_MTP_LAYERS)
    return 0 if value is None else check_count(_MTP_LAYERS, value, at_least=0)
