"""In-place state of a pipeline's stages: put back when the lanes are joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.engine import MicrobatchState
from overlap.ir import Op
from overlap.lanes import NullLanes
from overlap.lower import Issue
from overlap.pipelining import Pipeline, ScheduleKind, evaluate_pipeline, train_pipeline
from recompute import state
from tests.pipelining.models import alone, batch, make_pipeline, small, uniform


class Spy(NullLanes):
    """Stand-in lanes of several streams: whether they are joined."""

    joined = True

    def begin(self, issue: Issue, owner: Any) -> None:
        """The issue's kernels may run from now on."""
        self.joined = False

    def finish(self) -> None:
        """All have run."""
        self.joined = True


class Count:
    """An observer that moves the state in every first pass of the head, and may trip in a backward."""

    def __init__(self, buffer: torch.Tensor, *, trips: bool) -> None:
        self.buffer = buffer
        self.trips = trips

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.stage.name == "head" and issue.slot.op in (Op.FORWARD, Op.NO_GRAD):
            self.buffer.add_(1)
        if self.trips and issue.slot.op is Op.BACKWARD and owner.number == 1:
            raise ArithmeticError("planted")

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing."""


def pipeline_with_state(lanes: Spy) -> tuple[Pipeline, torch.Tensor]:
    """Its last stage holds a buffer."""
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, small(layers=2), uniform(), lanes=lanes)
    buffer = torch.zeros(1)
    (head,) = (stage for stage in pipeline.chunks[1].program.stages if stage.name == "head")
    object.__setattr__(head, "state", (buffer,))
    return pipeline, buffer


@pytest.mark.parametrize("fails", [True, False])
def test_state_is_put_back_when_the_lanes_are_joined(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails, and evaluation."""
    joined: list[bool] = []
    put, lanes = state.put, Spy()

    def watched(*arguments: Any) -> None:
        joined.append(lanes.joined)
        put(*arguments)

    with alone():
        pipeline, buffer = pipeline_with_state(lanes)
        feeds = batch(small(layers=2), 3)
        train_pipeline(pipeline, feeds, observers=(Count(buffer, trips=False),))
        assert buffer.item() == 3
        monkeypatch.setattr(state, "put", watched)
        if fails:
            with pytest.raises(ArithmeticError, match="planted"):
                train_pipeline(pipeline, feeds, observers=(Count(buffer, trips=True),))
        else:
            evaluate_pipeline(pipeline, feeds, observers=(Count(buffer, trips=False),))
    assert (joined, buffer.item()) == ([True], 3)
