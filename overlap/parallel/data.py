"""DataParallel: what keeps the replicas of a model in step, plugged into ModelChunk and train_step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from overlap.ir import Program
from overlap.lanes import Lanes
from overlap.lower import Plan
from overlap.parallel.actions import Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """What a pipeline runs of one chunk in one go."""

    plan: Plan
    """The chunk's own issues of the plan."""
    backward: int | None
    """The microbatch that runs backward in it."""


class DataParallel(Protocol):
    """Brings parameters to the stages that read them, and gradients to all ranks that hold the parameter.

    Every method is called at the same moments on all ranks, as the plans are the same there.
    """

    def bound(self) -> None:
        """The chunk is bound to its module anew: forget what was made for the parameters that were there before.

        Raises:
            ConfigError: What is there now cannot be kept in step.
        """

    def keep_reduced(self, program: Program) -> None:
        """Gradients that are there were reduced before: the next reduction, which adds to them, is to leave them so."""

    def begin(self, program: Program, plans: Sequence[Plan], lanes: Lanes, *, reduce: bool) -> Lanes:
        """A step begins.

        Args:
            program: The chunk's.
            plans: The step's; the last one holds the backward of the last microbatch.
            lanes: Where issues run.
            reduce: Whether the gradients are complete at the step's end: the last of several accumulating calls.

        Returns:
            The lanes to run the step on.
        """

    def around(self, program: Program, runs: Sequence[ChunkRun], *, reduce: bool) -> Sequence[Actions]:
        """The same for a step of a pipeline, where one plan may run for many microbatches, the last one among them.

        Args:
            program: The chunk's.
            runs: All that the step runs of the chunk, in that order.
            reduce: As in begin().

        Returns:
            Per run, what to do around its issues. It may be used for every step of these runs.
        """

    def end(self) -> None:
        """All issues have run and the lanes are joined: bring what is under way to its end."""

    def abandon(self) -> None:
        """The step failed: be as before it, gradients aside. Waits for no other rank."""

    def whole(self) -> AbstractContextManager[None]:
        """All parameters are there inside, for who runs stages without a plan."""

    def after_microbatch(self, program: Program, *, last: bool) -> None:
        """The reference has run a microbatch's backward; `last`: gradients are complete, reduce them and wait."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that this rank holds, in the same memory; itself if that is all."""

    def parameter_groups(self, module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
        """The parameters as an optimizer takes them: those of one layout over ranks together."""


class Alone:
    """One replica: nothing to keep in step."""

    def bound(self) -> None:
        """Nothing was made."""

    def keep_reduced(self, program: Program) -> None:
        """Nothing reduces."""

    def begin(self, program: Program, plans: Sequence[Plan], lanes: Lanes, *, reduce: bool) -> Lanes:
        """The lanes as they are: the hot loop sees nothing of this."""
        return lanes

    def around(self, program: Program, runs: Sequence[ChunkRun], *, reduce: bool) -> Sequence[Actions]:
        """Nothing."""
        return [Actions() for _ in runs]

    def end(self) -> None:
        """Nothing is under way."""

    def abandon(self) -> None:
        """Nothing is under way."""

    def whole(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()

    def after_microbatch(self, program: Program, *, last: bool) -> None:
        """Nothing to reduce."""

    def local(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def parameter_groups(self, module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
        """One group."""
        return [{"params": list(module.parameters())}]
