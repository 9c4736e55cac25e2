"""What lasts longer than a pipeline's step: in-place state, what the caller feeds, what trains, what is left over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from overlap.engine import Engine, MicrobatchState
from overlap.ir import Op
from overlap.lanes import NullLanes
from overlap.lower import Issue
from overlap.pipelining import Pipeline, ScheduleKind, evaluate_pipeline, train_pipeline
from overlap.pipelining.verify import merge_embedding
from overlap.reference import reference_step
from recompute import state
from recompute.errors import RecomputeError
from tests.pipelining.models import alone, batch, different, make_pipeline, make_reference, small, uniform


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


def test_what_trains_may_change_between_steps() -> None:
    with alone():
        config = small(layers=2)
        pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
        reference = make_reference(ScheduleKind.INTERLEAVED, config, uniform())
        for step, frozen in enumerate((("embedding", "layers.0"), ("nothing",))):
            for module in (reference.module, *(chunk.module for chunk in pipeline.chunks)):
                module.zero_grad()
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(not name.startswith(frozen))
            feeds = batch(config, 3, step)
            expected = reference_step(reference, feeds)
            assert different(pipeline, reference, train_pipeline(pipeline, feeds), expected) == []


def test_copies_of_an_embedding_are_added_up_once_after_the_last_call() -> None:
    with alone():
        config = small(layers=2, mtp=1)
        pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
        reference = make_reference(ScheduleKind.INTERLEAVED, config, uniform())
        for step in range(2):
            feeds = batch(config, 2, step)
            expected = reference_step(reference, feeds, 2)
            found = train_pipeline(pipeline, feeds, 2, last=step == 1)
        merge_embedding(reference)
        assert different(pipeline, reference, found, expected) == []


class Overwrites:
    """Writes to what the caller fed once a first pass has read it."""

    def __init__(self, feeds: Sequence[Any]) -> None:
        self.feeds = feeds

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.BACKWARD:
            # Unnoticed by the embedding's own graph, which holds the caller's ids.
            self.feeds[owner.number]["ids"].data.zero_()

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        return


def test_a_replay_reads_what_was_fed() -> None:
    """An MTP depth is replayed from the ids of its microbatch, whatever the caller has made of them since."""
    with alone():
        config = small(layers=1, mtp=1, mtp_detach=True)
        pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
        reference = make_reference(ScheduleKind.INTERLEAVED, config, uniform())
        feeds = batch(config, 3)
        expected = reference_step(reference, batch(config, 3))
        found = train_pipeline(pipeline, feeds, observers=(Overwrites(feeds),))
        assert different(pipeline, reference, found, expected) == ["embedding"]


class Leaves(Engine):
    """A control: something of every backward stays."""

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._backward(issue, owner)
        owner.values["left", 0] = torch.zeros(1)


@pytest.mark.parametrize("kind", [ScheduleKind.INTERLEAVED, ScheduleKind.ZBV])
def test_what_a_backward_leaves_is_noticed(kind: ScheduleKind) -> None:
    with alone():
        pipeline = make_pipeline(kind, small(layers=2), uniform())
        with pytest.raises(RecomputeError, match=r"stage \d of the pipeline does not consume what it makes: \['values"):
            train_pipeline(pipeline, batch(small(layers=2), 3), engine_type=Leaves)
