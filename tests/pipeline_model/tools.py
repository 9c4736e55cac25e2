"""Pipelines as tests write them."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.costs import PRESETS, StageCosts
from overlap.orders import load_order
from overlap.pipeline_model.actions import Action, PipelineSchedule, Step, Work
from overlap.synthetic import MOE, System
from recompute.config import RecomputeConfig


def action(text: str) -> Action:
    """Read what `str(action)` prints."""
    place = next(place for place, letter in enumerate(text) if letter.isalpha())
    return Action(int(text[:place]), Work(text[place]), int(text[place + 1 :]))


def steps(text: str) -> tuple[Step, ...]:
    """Steps between blanks, actions of a pair between semicolons."""
    return tuple(tuple(map(action, word.split(";"))) for word in text.split())


def schedule(*ranks: str, stages: int = 0, microbatches: int = 1) -> PipelineSchedule:
    """A schedule from a line per rank."""
    lines = tuple(map(steps, ranks))
    return PipelineSchedule(name="mine", ranks=lines, num_stages=stages or len(ranks), microbatches=microbatches)


def system(
    layers: int, recompute: RecomputeConfig, *, costs: StageCosts = PRESETS["h200"], delayed: bool = True
) -> System:
    """A model of MoE layers."""
    order = load_order("single_queue", recompute.replay)
    return System(kinds=(MOE,) * layers, order=order, recompute=recompute, costs=costs, delayed=delayed)


def texts(lists: Sequence[Sequence[object]]) -> list[str]:
    """Each list's items between blanks."""
    return [" ".join(map(str, items)) for items in lists]
