"""The schedules' action lists as torch.distributed.pipelining makes them: the one file here that names its private API.

GPipe and plain 1F1B are ours: torch keeps no list for them that its own runtime follows (the printed one numbers the
last rank's microbatches from 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from overlap.pipeline_model.actions import (
    Action,
    PipelineSchedule,
    Step,
    Work,
    gpipe,
    one_f_one_b,
    pair_steady,
    unpaired,
)
from recompute.errors import ConfigError

SCHEDULES = ("interleaved", "dualpipev", "zbv", "1f1b", "gpipe")
PAIRED = ("interleaved", "dualpipev")
"""Schedules in which forwards and backwards overlap."""
SPLIT = ("dualpipev", "zbv")
"""Schedules in which some backwards are split into I and W."""
_CHUNKS = {"dualpipev": 2, "zbv": 2, "1f1b": 1}


def make_schedule(name: str, ranks: int, chunks: int, microbatches: int, *, pairs: bool = True) -> PipelineSchedule:
    """What every rank runs.

    Args:
        name: One of SCHEDULES.
        ranks: Pipeline ranks, at least 2.
        chunks: Virtual stages of a rank.
        microbatches: Of a step.
        pairs: False: no forward overlaps with a backward; interleaved 1F1B then has no extra warm-up either.

    Raises:
        ConfigError: torch rejects the schedule for these numbers; the rule is torch's.
    """
    _check(name, ranks, chunks, microbatches)
    makers: dict[str, Callable[[], Sequence[Sequence[Step]]]] = {
        "interleaved": lambda: _interleaved(ranks, chunks, microbatches, pairs),
        "dualpipev": lambda: _v_shaped("ScheduleDualPipeV", ranks, microbatches, pairs),
        "zbv": lambda: _v_shaped("ScheduleZBVZeroBubble", ranks, microbatches, pairs),
        "1f1b": lambda: [[(action,) for action in actions] for actions in one_f_one_b(ranks, microbatches)],
        "gpipe": lambda: [[(action,) for action in actions] for actions in gpipe(ranks, chunks, microbatches)],
    }
    return PipelineSchedule(
        name=name if pairs or name not in PAIRED else f"{name}, no pairs",
        ranks=tuple(tuple(steps) for steps in makers[name]()),
        num_stages=ranks * chunks,
        microbatches=microbatches,
    )


def _check(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError(field="schedule", value=name, rule=f"must be one of {', '.join(SCHEDULES)}")
    if ranks < 2:
        raise ConfigError(field="pp", value=ranks, rule="must be at least 2")
    if chunks < 1 or chunks != _CHUNKS.get(name, chunks):
        rule = f"must be {_CHUNKS[name]} for schedule {name}" if name in _CHUNKS else "must be at least 1"
        raise ConfigError(field="vpp", value=chunks, rule=rule)
    if microbatches < 1:
        raise ConfigError(field="microbatches", value=microbatches, rule="must be at least 1")
    if name == "dualpipev" and microbatches < ranks * chunks:
        rule = f"dualpipev needs as many as there are virtual stages: at least {ranks * chunks}"
        raise ConfigError(field="microbatches", value=microbatches, rule=rule)
    rounds = max(1, microbatches // ranks)
    if name == "interleaved" and microbatches % rounds:
        rule = f"interleaved runs them in {rounds} rounds: must be a multiple of that"
        raise ConfigError(field="microbatches", value=microbatches, rule=rule)


def _schedules() -> ModuleType:
    """The module of torch.

    Raises:
        ConfigError: This build of torch has none.
    """
    try:
        from torch.distributed.pipelining import schedules
    except ImportError as error:
        rule = f"this torch build has no torch.distributed.pipelining ({error}): take 1f1b or gpipe"
        raise ConfigError(field="schedule", value="...", rule=rule) from error
    return schedules


def _interleaved(ranks: int, chunks: int, microbatches: int, pairs: bool) -> list[tuple[Step, ...]]:
    """Interleaved 1F1B, with its steady state paired and one more warm-up forward."""
    torch_lists = _schedules()
    per_round = microbatches // max(1, microbatches // ranks)
    total = chunks * microbatches
    found: list[tuple[Step, ...]] = []
    for rank in range(ranks):
        needed = torch_lists._get_warmup_ops(rank, chunks, per_round, ranks, microbatches)
        warmup = min(needed + int(pairs), total)

        def forward_stage(place: int, rank: int = rank) -> int:
            return (place // per_round) % chunks * ranks + rank

        def backward_stage(place: int, rank: int = rank, warmup: int = warmup) -> int:
            return (chunks - 1 - (place - warmup) // per_round % chunks) * ranks + rank

        listed = torch_lists._get_1f1b_rank_ops(
            chunks, ranks, warmup, total - warmup, warmup, rank, forward_stage, backward_stage
        )
        steps = _steps(listed)
        found.append(pair_steady([action for step in steps for action in step], warmup) if pairs else steps)
    return found


def _v_shaped(class_name: str, ranks: int, microbatches: int, pairs: bool) -> list[tuple[Step, ...]]:
    """A schedule that lays two virtual stages of each rank out as a V; only the numbers are given to torch's class."""
    listing = getattr(_schedules(), class_name)._calculate_single_rank_operations
    numbers = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=microbatches)
    found = [_steps(listing(numbers, rank)) for rank in range(ranks)]
    return found if pairs else [unpaired(steps) for steps in found]


def _steps(listed: Sequence[Any]) -> tuple[Step, ...]:
    """Actions of torch as ours; None is a bubble, which the times decide here."""
    works = {"FORWARD": Work.FORWARD, "FULL_BACKWARD": Work.BACKWARD, "BACKWARD_INPUT": Work.INPUT,
             "BACKWARD_WEIGHT": Work.WGRAD}  # fmt: skip
    return tuple(
        tuple(
            Action(part.stage_index, works[part.computation_type.name], part.microbatch_index)
            for part in action.sub_actions or (action,)
        )
        for action in listed
        if action is not None
    )
