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
from overlap.planning.bins import Bytes, RankBin, add, total
from overlap.planning.chunks import ChunkShape
from overlap.planning.job import Job
from overlap.planning.survey import Survey
from overlap.planning.timing import plan_time
from overlap.planning.walk import RankWalk, Walked
from overlap.side import Side
from recompute.config import Keep, RecomputeConfig
from recompute.modules import RecomputeModule
from recompute.planner import Choice
from recompute.segments import RecomputeSegment

_RECENT = 8
"""Forward plans that are kept: of the chunks of one choice. All of them would take gigabytes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A distinct plan."""

    bytes: Bytes
    """At its highest point, the microbatches of the plan alone."""
    height: int
    """Their sum."""
    time: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPieces:
    """One microbatch of a chunk by itself."""

    forward: Piece
    backward: Piece
    waiting: Bytes
    """What is kept between the two."""
    done: Bytes
    """What is kept after its backward: losses and counters, until the step ends."""


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
        self._chunks: dict[Form, ChunkPieces] = {}
        self._pairs: dict[tuple[Form, Form], Piece] = {}
        self._forward_plan = lru_cache(_RECENT)(lambda form: self.plan(form, None))

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

    def chunk(self, form: Form) -> ChunkPieces:
        """A microbatch of a chunk: its forward, then its backward.

        Raises:
            ScheduleError: The order does not fit.
        """
        if form not in self._chunks:
            walk = self._walk([form])
            forward, backward = self._forward_plan(form), self.plan(None, form)
            ahead = self._piece(forward, walk.walk(forward, 0, None))
            waiting = walk.now()
            behind = self._piece(backward, walk.walk(backward, None, 0))
            kept = self._sent() if self._job.keep_sends else {}
            sends = kept if not form.shape.last else {}
            returns = kept if not form.shape.first else {}
            self._chunks[form] = ChunkPieces(
                forward=ahead,
                backward=behind,
                waiting=add(waiting, sends),
                done=add(walk.now(), sends, returns),
            )
        return self._chunks[form]

    def pair(self, forward: Form, backward: Form) -> Piece:
        """The forward of one chunk beside the backward of one, of two microbatches.

        Raises:
            ScheduleError: The order does not fit.
        """
        if (forward, backward) not in self._pairs:
            walk = self._walk([backward, forward])
            walk.walk(self._forward_plan(backward), 0, None)
            plan = self.plan(forward, backward)
            self._pairs[forward, backward] = self._piece(plan, walk.walk(plan, 1, 0))
        return self._pairs[forward, backward]

    def _piece(self, plan: Plan, walked: Walked) -> Piece:
        times = [self._time(issue, work) for issue, work in zip(plan.issues, walked.work, strict=True)]
        return Piece(bytes=walked.bytes, height=total(walked.bytes), time=plan_time(plan, times))

    def _sent(self) -> Bytes:
        return {RankBin.PIPELINE: self._job.sent}

    def _walk(self, forms: Sequence[Form]) -> RankWalk:
        gaps = [self.gap(form) for form in forms]
        footprints = [self._survey[form.shape].footprint for form in forms]
        return RankWalk(footprints, gaps, delayed=forms[0].delayed, ranks=self._job.shards)

    def gap(self, form: Form) -> Gap:
        """What a microbatch of a chunk keeps between its forward and its backward, by name."""
        return gap_of(self._planners[form.shape], self._configs[form], self._trained[form.shape])

    def plan(self, forward: Form | None, backward: Form | None) -> Plan:
        """The plan of the chunks that run forward and backward, of two microbatches; None: nobody does."""
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
