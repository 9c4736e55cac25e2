"""The vocabulary of a pipeline schedule: actions of virtual stages, steps of ranks, and the rule which pairs overlap.

Owns lists only. When a step runs is run's, what it costs is costs', where torch's lists come from is torch_lists'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from overlap.errors import ScheduleError


class Work(StrEnum):
    """What a virtual stage does for a microbatch; letters as torch.distributed.pipelining prints them."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward."""
    INPUT = "I"
    """Gradients of the inputs; weight gradients that are not deferred are in it."""
    WGRAD = "W"
    """Weight gradients that were deferred."""


BACKWARDS = (Work.BACKWARD, Work.INPUT)
"""They send a gradient to the stage before."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: `3F0` is virtual stage 3's forward of microbatch 0."""

    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}"


Step = tuple[Action, ...]
"""What a rank runs as one plan: an action, or a forward and a backward that overlap."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineSchedule:
    """What every rank runs, in order. Checked at construction.

    Raises:
        ScheduleError: A stage has two ranks, or a (stage, microbatch) does not have one forward, then one backward or
            one I and one W.
    """

    name: str
    ranks: tuple[tuple[Step, ...], ...]
    num_stages: int
    """Virtual stages of all ranks."""
    microbatches: int

    def __post_init__(self) -> None:
        done: dict[tuple[int, int], str] = {}
        for rank, steps in enumerate(self.ranks):
            for place, step in enumerate(steps):
                for action in step:
                    key = action.stage, action.microbatch
                    done[key] = done.get(key, "") + action.work.value
                    if done[key] not in _PREFIXES or self.rank_of.get(action.stage) != rank:
                        reason = f"rank {rank} runs {action} out of order, a second time, or as another rank's stage"
                        raise ScheduleError(reason, [step_text(s) for s in steps], place)
        for stage in range(self.num_stages):
            for microbatch in range(self.microbatches):
                if done.get((stage, microbatch)) not in _WHOLE:
                    raise ScheduleError(f"stage {stage} does not finish microbatch {microbatch}")

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank of each virtual stage: the first that runs anything of it."""
        found: dict[int, int] = {}
        for rank, steps in enumerate(self.ranks):
            for step in steps:
                for action in step:
                    found.setdefault(action.stage, rank)
        return found

    @property
    def paired_share(self) -> float:
        """Share of the forwards that overlap with a backward."""
        pairs = sum(len(step) > 1 for steps in self.ranks for step in steps)
        return pairs / (self.num_stages * self.microbatches)


_WHOLE = ("FB", "FIW")
_PREFIXES = ("F", "FI", *_WHOLE)


def step_text(step: Step) -> str:
    """`3F0`, or `3F0;1B2` for a pair."""
    return ";".join(map(str, step))


def pair_steady(actions: Sequence[Action], warmup: int) -> tuple[Step, ...]:
    """Make the (forward, backward) neighbours of a rank's steady state pairs.

    Pairing any neighbours instead can pair across the end of the warm-up, which deadlocks or costs a turn each time.

    Args:
        actions: `warmup` forwards, then (F, B) alternating, then backwards.
        warmup: Forwards before the first pair. With one more than the schedule needs, the F and B of a pair belong
            to different microbatches on the last rank too.

    Raises:
        ScheduleError: The steady state does not alternate.
    """
    forwards = sum(action.work is Work.FORWARD for action in actions)
    end = warmup + 2 * (forwards - warmup)
    steps: list[Step] = [(action,) for action in actions[:warmup]]
    for place in range(warmup, end, 2):
        forward, backward = actions[place], actions[place + 1]
        if (forward.work, backward.work) != (Work.FORWARD, Work.BACKWARD):
            raise ScheduleError("the steady state does not alternate forward and backward", actions, place)
        same = (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch)
        steps += [(forward,), (backward,)] if same else [(forward, backward)]
    return (*steps, *((action,) for action in actions[end:]))


def unpaired(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same work with every pair run one after the other."""
    return tuple((action,) for step in steps for action in step)


def gpipe(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """All forwards, stage after stage, then all backwards, last stage first."""
    found: list[list[Action]] = []
    for rank in range(ranks):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forward = [Action(stage, Work.FORWARD, number) for stage in stages for number in range(microbatches)]
        backward = [Action(s, Work.BACKWARD, number) for s in reversed(stages) for number in range(microbatches)]
        found.append(forward + backward)
    return found


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """As many forwards as there are ranks behind, then one forward and one backward in turn, then backwards."""
    found: list[list[Action]] = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, microbatches)
        actions = [Action(rank, Work.FORWARD, number) for number in range(warmup)]
        for number in range(microbatches):
            if number + warmup < microbatches:
                actions.append(Action(rank, Work.FORWARD, number + warmup))
            actions.append(Action(rank, Work.BACKWARD, number))
        found.append(actions)
    return found
