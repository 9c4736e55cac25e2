"""Agreement: ranks compare their settings before they communicate, and what they issued after a step.

Ranks that differ would hang, or take each other's data for their own. Comparing is one exchange of small objects over
CPU; it ends within the time limit of the process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from overlap.errors import RanksDisagree
from overlap.parallel.world import World
from recompute.errors import ConfigError


def gather(world: World, item: Any) -> list[Any]:
    """Every rank's item, by rank; pickled.

    Collective over all ranks of the job.
    """
    if world.groups is None:
        return [item]
    items: list[Any] = [None] * world.size
    dist.all_gather_object(items, item, group=world.groups.everyone)
    return items


def agree(world: World, settings: Mapping[str, object]) -> None:
    """Check that the ranks of each pipeline stage have the same settings.

    Collective over all ranks of the job.

    Args:
        world: This rank.
        settings: Values by field name, causes before what follows from them; the first that differs is reported.

    Raises:
        ConfigError: On every rank, if any two of a stage differ; names the field and each rank's value.
    """
    # The settings of a deep model are long, and nearly always equal.
    digests = gather(world, hashlib.blake2b(repr(list(settings.items())).encode()).hexdigest())
    groups = world.layout.data_groups()
    if all(digests[rank] == digests[ranks[0]] for ranks in groups for rank in ranks):
        return
    everyone = gather(world, dict(settings))
    for ranks in groups:
        for field in dict.fromkeys(name for rank in ranks for name in everyone[rank]):
            values = {rank: everyone[rank].get(field) for rank in ranks}
            if any(value != values[ranks[0]] for value in values.values()):
                raise ConfigError(field=field, value=_shortened(values), rule="must be the same on these ranks")


def compare_failed(world: World, launched: int) -> None:
    """Check that all ranks stopped at the same place of a step that failed, or had no such step.

    Else a collective that some of them launched would pair with one of the next step.

    Collective over all ranks of the job.

    Args:
        world: This rank.
        launched: Collectives that it launched in steps that failed.

    Raises:
        RanksDisagree: On every rank, if any two differ.
    """
    counts = gather(world, launched)
    if len(set(counts)) > 1:
        raise RanksDisagree({rank: f"{count} until its step failed" for rank, count in enumerate(counts)})


def compare_collectives(world: World) -> None:
    """In debug mode, check that all ranks of each pipeline stage issued the same collectives since the last call.

    Raises:
        RanksDisagree: On every rank; names the first that differs.
    """
    if world.debug is None:
        return
    digests = gather(world, world.debug.digest())
    if any(digests[rank] != digests[ranks[0]] for ranks in world.layout.data_groups() for rank in ranks):
        logs = gather(world, tuple(world.debug.entries))
        ranks = next(r for r in world.layout.data_groups() if len({logs[rank] for rank in r}) > 1)
        raise RanksDisagree(_shortened({rank: logs[rank] for rank in ranks}))
    world.debug.clear()


def _shortened(values: Mapping[int, Any]) -> dict[int, Any]:
    """Sequences cut to their first difference, with its place."""
    sequences = list(values.values())
    if not all(isinstance(value, tuple) for value in sequences):
        return dict(values)
    place = _first_difference(sequences)
    return {rank: f"entry {place}: {value[place] if place < len(value) else 'none'}" for rank, value in values.items()}


def _first_difference(sequences: Sequence[tuple[Any, ...]]) -> int:
    longest = max(len(sequence) for sequence in sequences)
    for place in range(longest):
        if len({repr(sequence[place : place + 1]) for sequence in sequences}) > 1:
            return place
    return longest
