"""The parts of a layer that selective recompute can name: `RecomputeModule`, and how they lie in each other.

Owns names only. Which stages of a program offer them is overlap's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from recompute.errors import ConfigError


class RecomputeModule(StrEnum):
    """A part of a layer that is rebuilt in backward instead of kept.

    `attn`, `experts` and `shared_experts` are whole stages: what they read is kept. The others are rebuilt inside the
    backward of the stage that holds them, and what they give is let go as well.
    """

    ATTN = "attn"
    """The stage up to the all-to-all: norms, attention, router, permutation; both stages where it is cut in two."""
    EXPERTS = "experts"
    """The experts of a MoE layer, the feed-forward of a dense one; the rows they received are kept."""
    SHARED_EXPERTS = "shared_experts"
    """The shared expert."""
    CORE_ATTN = "core_attn"
    """The attention product of queries, keys and values, with its dropout."""
    LAYERNORM = "layernorm"
    """The norms in front of attention and of the feed-forward."""
    MLA_UP_PROJ = "mla_up_proj"
    """Multi-head latent attention: from the latents to queries, keys and values, rotary embedding included."""
    MOE_ACT = "moe_act"
    """The activation function of the experts."""


STAGES_OF: Mapping[RecomputeModule, tuple[str, ...]] = MappingProxyType(
    {
        RecomputeModule.ATTN: ("attn", "post_attn"),
        RecomputeModule.EXPERTS: ("experts",),
        RecomputeModule.SHARED_EXPERTS: ("shared",),
    }
)
"""The stages that a module is, by name, as far as a layer has them; the other modules lie inside one."""

_WITHIN: Mapping[RecomputeModule, RecomputeModule] = MappingProxyType(
    {
        RecomputeModule.CORE_ATTN: RecomputeModule.ATTN,
        RecomputeModule.LAYERNORM: RecomputeModule.ATTN,
        RecomputeModule.MLA_UP_PROJ: RecomputeModule.ATTN,
        RecomputeModule.MOE_ACT: RecomputeModule.EXPERTS,
    }
)


def parse_modules(value: object) -> tuple[RecomputeModule, ...]:
    """Turn names into modules, in the order of the enum, so that equal choices are equal.

    Args:
        value: A tuple or list of modules or their names.

    Raises:
        ConfigError: `value` is no tuple or list, a name is unknown or stands twice, or a module lies inside another
            one that is named too.
    """
    if type(value) not in (tuple, list):
        raise ConfigError(field="modules", value=value, rule=f"must be a tuple of names; known are {_known()}")
    names = [str(name) for name in value]  # type: ignore[attr-defined]  # checked above
    for name in names:
        if name not in [module.value for module in RecomputeModule]:
            raise ConfigError(field="modules", value=name, rule=f"is no module; known are {_known()}")
        if names.count(name) > 1:
            raise ConfigError(field="modules", value=name, rule="stands twice")
    modules = tuple(module for module in RecomputeModule if module.value in names)
    for module in modules:
        around = _WITHIN.get(module)
        if around in modules:
            raise ConfigError(field="modules", value=module.value, rule=f"has no effect beside {around.value!r}")
    return modules


def _known() -> str:
    return ", ".join(RecomputeModule)
