"""DataParallel: what keeps the replicas of a model in step, plugged into ModelChunk and train_step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn

from overlap.ir import Program
from overlap.lanes import Lanes
from overlap.lower import Plan


class DataParallel(Protocol):
    """Brings parameters to the stages that read them, and gradients to all ranks that hold the parameter.

    Every method is called at the same moments on all ranks, as the plans are the same there.
    """

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

    def begin(self, program: Program, plans: Sequence[Plan], lanes: Lanes, *, reduce: bool) -> Lanes:
        """The lanes as they are: the hot loop sees nothing of this."""
        return lanes

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
