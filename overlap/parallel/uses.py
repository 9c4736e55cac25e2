"""Uses: which stages use which groups of parameters, from a program's declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlap.ir import WEIGHTS, Program, StageKey, Trainable


@dataclass(frozen=True, eq=False)
class Uses:
    """What a program's stages use of some groups of parameters; groups by their place in the list."""

    groups: Mapping[StageKey, tuple[int, ...]]
    """Per stage, the groups that it reads a parameter of."""
    held: frozenset[int]
    """Groups with a parameter that is a value: its readers may be anywhere in the step, and a replay reads it again."""
    planned: tuple[frozenset[int], ...]
    """Per group, the places of the parameters that get a gradient in every step: those that train and are read."""
    givers: tuple[frozenset[StageKey], ...]
    """Per group, the stages that give them."""


def uses_of(program: Program, groups: Sequence[Sequence[Trainable]]) -> Uses:
    """Find out who uses what."""
    home = {id(p): (number, place) for number, group in enumerate(groups) for place, p in enumerate(group)}
    by_stage: dict[StageKey, tuple[int, ...]] = {}
    planned: list[set[int]] = [set() for _ in groups]
    givers: list[set[StageKey]] = [set() for _ in groups]
    for stage in program.stages:
        found = [(home[id(p)], p) for p in stage.parameters if id(p) in home]
        if found:
            by_stage[stage.key] = tuple(dict.fromkeys(number for (number, _), _ in found))
        for (number, place), parameter in found:
            if parameter.requires_grad:
                planned[number].add(place)
                givers[number].add(stage.key)
    return Uses(
        groups=by_stage,
        held=frozenset(by_stage.get((None, WEIGHTS), ())),
        planned=tuple(map(frozenset, planned)),
        givers=tuple(map(frozenset, givers)),
    )


def trainable(program: Program) -> tuple[bool, ...]:
    """Which parameters train now, in program order: what is cached per plan depends on it."""
    return tuple(parameter.requires_grad for stage in program.stages for parameter in stage.parameters)
