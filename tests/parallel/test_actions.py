from __future__ import annotations

from functools import partial
from typing import Any

from overlap.lanes import NullLanes
from overlap.parallel.actions import ActingLanes, Actions
from overlap.plan import PlanRequest
from tests.parallel.models import small_chunk


class Noting(NullLanes):
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def begin(self, issue: Any, owner: Any) -> None:
        self._log.append("begin")

    def end(self, issue: Any, owner: Any) -> None:
        self._log.append("end")

    def finish(self) -> None:
        self._log.append("finish")


def test_actions_run_inside_the_lane_of_their_issue() -> None:
    """Behind what the issue waits for, and before whoever waits for the issue may go on."""
    chunk, log = small_chunk(), list[str]()
    config = chunk.configs(1)[0]
    one, other, *_ = chunk.planner.plan(PlanRequest(config, None, chunk.program.trained())).issues
    actions = Actions()
    for text in ("first", "second"):
        actions.add_before(one, partial(log.append, f"before {text}"))
        actions.add_after(one, partial(log.append, f"after {text}"))
    lanes: Any = ActingLanes(Noting(log), actions)
    for issue in (one, other):
        lanes.begin(issue, None)
        lanes.end(issue, None)
    lanes.finish()
    own = ["begin", "before first", "before second", "after first", "after second", "end"]
    assert log == [*own, "begin", "end", "finish"]


def test_what_is_done_can_be_added_up_and_changed_between_plans() -> None:
    """A pipeline runs one plan for many microbatches, and acts differently around the last."""
    chunk, log = small_chunk(), list[str]()
    issue, *_ = chunk.planner.plan(PlanRequest(chunk.configs(1)[0], None, chunk.program.trained())).issues
    actions, others = Actions(), Actions()
    actions.add_before(issue, partial(log.append, "own"))
    others.add_before(issue, partial(log.append, "theirs"))
    actions.add(others)
    lanes: Any = ActingLanes(NullLanes(), Actions())
    lanes.begin(issue, None)
    lanes.use(actions)
    lanes.begin(issue, None)
    lanes.use(others)
    lanes.begin(issue, None)
    assert log == ["own", "theirs", "theirs"]
