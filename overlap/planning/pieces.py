"""Pieces: what every distinct plan of a job takes: bytes at its highest point, and time.

Two choices that recompute a chunk in the same way need the same of it: a group of three layers is a group of two where
a chunk has two. So plans are made by the form that a choice gives a chunk, and each form once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from overlap.ir import Lane, Op, StageKey
from overlap.lower import Issue, Key, Plan, lower
from overlap.memory.device_model import DeviceModel
from overlap.memory.facts import Work
from overlap.memory.gap import Gap, gap_of
from overlap.orders import Order, get_order, load_order
from overlap.pipeline_model.run import StepTime
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, make_schedule
from overlap.planning.bins import Bytes, RankBin, add
from overlap.planning.chunks import ChunkShape
from overlap.planning.job import Job
from overlap.planning.loans import NOTHING, Beginning
from overlap.planning.survey import Survey
from overlap.planning.timing import plan_time
from overlap.planning.walk import RankWalk, Walked
from overlap.side import Side
from recompute.config import Keep, RecomputeConfig
from recompute.modules import RecomputeModule
from recompute.planner import Choice
from recompute.segments import RecomputeSegment

_RECENT = 32
"""Plans that are kept: of the chunks of one choice. All of them would take gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A chunk as a choice runs it: everything that its plans depend on."""

    shape: ChunkShape
    order: Order
    delayed: bool
    segments: tuple[RecomputeSegment, ...]
    alone: tuple[StageKey, ...]
    parts: frozenset[tuple[StageKey, frozenset[RecomputeModule]]]
    hidden: bool
    keep: Keep


Pair = tuple[Form | None, Form | None]
"""The chunks that run forward and backward in a plan; None: nobody does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one microbatch of a chunk keeps between plans."""

    waiting: Bytes
    """Between its forward and its backward."""
    done: Bytes
    """After its backward: losses and counters, until the step ends."""


class Pieces:
    """The plans of a job; each is made when it is first asked for.

    Args:
        job: The job.
        survey: Its dry runs.
        device: Turns work into time.
        order: Name of a built-in order, or a file.
    """

    def __init__(self, job: Job, survey: Survey, device: DeviceModel, order: str) -> None:
        self._job = job
        self._survey = survey
        self._device = device
        self._order = cache(lambda replay: load_order(order, replay))
        # These planners say what a side is and keeps, which neither order nor weight gradients change.
        self._planners = {s: Planner(c.program, get_order("plain"), delayed=False) for s, c in survey.items()}
        self._trained = {shape: chunk.program.trained() for shape, chunk in survey.items()}
        self._configs: dict[Form, RecomputeConfig] = {}
        """The first that gave a chunk this form."""
        self._kept: dict[Form, Kept] = {}
        self._found: dict[tuple[Pair, Beginning], Walked] = {}
        self._times: dict[Pair, StepTime] = {}
        self.plan = lru_cache(_RECENT)(self._make_plan)

    def form(self, shape: ChunkShape, choice: Choice) -> Form:
        """The form that a choice gives a chunk.

        Raises:
            ScheduleError: There is no such order.
        """
        config = choice.recompute
        side = self._planners[shape].side(config, self._trained[shape])
        form = Form(
            shape=shape,
            order=self._order(config.replay),
            delayed=choice.delay_wgrad,
            segments=side.segments,
            alone=side.alone,
            parts=frozenset(side.parts.items()),
            hidden=side.hidden and bool(side.segments),
            keep=side.keep if side.stored else Keep.DEVICE,
        )
        self._configs.setdefault(form, config)
        return form

    def kept(self, form: Form) -> Kept:
        """What a microbatch of a chunk keeps.

        Raises:
            ScheduleError: The order does not fit.
        """
        if form not in self._kept:
            walk = self._walk([form])
            walk.walk(self.plan((form, None)), 0, None)
            waiting = walk.now()
            walk.walk(self.plan((None, form)), None, 0)
            sent = self._sent() if self._job.keep_sends else {}
            sends = sent if not form.shape.last else {}
            returns = sent if not form.shape.first else {}
            self._kept[form] = Kept(waiting=add(waiting, sends), done=add(walk.now(), sends, returns))
        return self._kept[form]

    def walked(self, pair: Pair, beginning: Beginning) -> Walked:
        """The forward of one chunk, the backward of one, or both side by side, of two microbatches.

        Args:
            pair: The chunks.
            beginning: What lanes hold before of the microbatch that runs backward.

        Raises:
            ScheduleError: The order does not fit.
        """
        if (pair, beginning) not in self._found:
            forward, backward = pair
            plan = self.plan(pair)
            walk = self._walk([form for form in (backward, forward) if form is not None])
            if backward is not None:
                walk.walk(self.plan((backward, None)), 0, None)
            ahead = None if forward is None else int(backward is not None)
            self._found[pair, beginning] = walk.walk(plan, ahead, None if backward is None else 0, beginning)
        return self._found[pair, beginning]

    def time(self, pair: Pair) -> StepTime:
        """How long a plan takes, whatever it begins with.

        Raises:
            ScheduleError: The order does not fit.
        """
        if pair not in self._times:
            plan, works = self.plan(pair), self.walked(pair, NOTHING).work
            times = [self._time(issue, work) for issue, work in zip(plan.issues, works, strict=True)]
            self._times[pair] = plan_time(plan, times)
        return self._times[pair]

    def _sent(self) -> Bytes:
        return {RankBin.PIPELINE: self._job.sent}

    def _walk(self, forms: Sequence[Form]) -> RankWalk:
        gaps = [self.gap(form) for form in forms]
        footprints = [self._survey[form.shape].footprint for form in forms]
        return RankWalk(footprints, gaps, delayed=forms[0].delayed, ranks=self._job.shards)

    def gap(self, form: Form) -> Gap:
        """What a microbatch of a chunk keeps between its forward and its backward, by name."""
        return gap_of(self._planners[form.shape], self._configs[form], self._trained[form.shape])

    def _make_plan(self, pair: Pair) -> Plan:
        forward, backward = pair
        sides: dict[int, Side] = {}
        kept: dict[int, frozenset[Key]] = {}
        given = [form for form in (forward, backward) if form is not None]
        for number, form in ((FORWARD_SIDE, forward), (BACKWARD_SIDE, backward)):
            if form is not None:
                asked = self._configs[form], self._trained[form.shape]
                sides[number] = self._planners[form.shape].side(*asked)
                if number == FORWARD_SIDE:
                    kept[number] = self._planners[form.shape].survivors(*asked)
        schedule = make_schedule(
            given[0].order, sides.get(FORWARD_SIDE), sides.get(BACKWARD_SIDE), delayed=given[0].delayed
        )
        return lower(schedule, sides, kept)

    def _time(self, issue: Issue, work: Work) -> float:
        job = self._job
        if issue.lane is Lane.COPY:
            return self._copy_time(issue, work.traffic)
        if issue.lane is not Lane.COMM:
            return work.milliseconds
        rows = max(job.copies, job.received)
        away = rows * job.model.hidden * job.item_size * (job.ep - 1) / job.ep
        return self._device.transfer_milliseconds(away)

    def _copy_time(self, issue: Issue, nbytes: float) -> float:
        """Of a segment input that leaves or returns."""
        if issue.keep is not Keep.SHARDED:
            return self._device.copy_milliseconds(nbytes)
        if issue.slot.op is Op.LOAD:
            return self._device.gather_milliseconds(nbytes * (self._job.shards - 1) / self._job.shards)
        return self._device.milliseconds(0.0, 2 * nbytes, torch.float32)
