"""Selective recompute on a program: which stages are rebuilt whole, and which rebuild parts of themselves.

The modules of a config apply to the layers that no segment covers: there alone is anything left to rebuild.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap.ir import Program, Stage, StageKey
from recompute.config import RecomputeConfig
from recompute.errors import ConfigError
from recompute.modules import STAGES_OF, RecomputeModule
from recompute.segments import RecomputeSegment


def rebuilt_stages(
    program: Program, config: RecomputeConfig, segments: Sequence[RecomputeSegment]
) -> tuple[StageKey, ...]:
    """Stages that are segments of their own, in program order."""
    names = {name for module in config.modules for name in STAGES_OF.get(module, ())}
    return tuple(stage.key for stage in _eager(program, segments) if stage.name in names)


def rebuilt_parts(
    program: Program, config: RecomputeConfig, segments: Sequence[RecomputeSegment]
) -> Mapping[StageKey, frozenset[RecomputeModule]]:
    """Per stage that keeps its graph, the parts of it that are rebuilt in its backward; stages without any left out."""
    wanted = frozenset(config.modules)
    return {stage.key: stage.inner & wanted for stage in _eager(program, segments) if stage.inner & wanted}


def modules_of(program: Program) -> tuple[RecomputeModule, ...]:
    """The modules that at least one layer of a program has, in the enum's order."""
    names = {stage.name for stage in program.stages if stage.layer is not None}
    inner = {module for stage in program.stages for module in stage.inner}
    return tuple(module for module in RecomputeModule if module in inner or names & {*STAGES_OF.get(module, ())})


def check_modules(program: Program, config: RecomputeConfig) -> None:
    """Refuse modules that no layer of a program has.

    Raises:
        ConfigError: Names the module.
    """
    offered = modules_of(program)
    for module in config.modules:
        if module not in offered:
            have = map(str, offered)
            rule = f"this model has no such module; it has {', '.join(have) or 'none'}"
            raise ConfigError(field="modules", value=module.value, rule=rule)


def _eager(program: Program, segments: Sequence[RecomputeSegment]) -> list[Stage]:
    covered = {layer for segment in segments for layer in segment.layers}
    return [stage for stage in program.stages if stage.layer is not None and stage.layer not in covered]
