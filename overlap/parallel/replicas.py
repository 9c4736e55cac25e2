"""Replicas: every rank holds all dense parameters; gradients are averaged once per step, while the step still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from overlap.ir import Program
from overlap.lanes import Lanes
from overlap.lower import Plan
from overlap.parallel.actions import ActingLanes, Actions
from overlap.parallel.buckets import (
    BUCKET_BYTES,
    Bucket,
    Pending,
    Reduction,
    make_buckets,
    start_reduction,
    undo_division,
)
from overlap.parallel.collective_log import Collectives
from overlap.parallel.data import ChunkRun
from overlap.parallel.moments import gradients_of, last_gradients
from overlap.parallel.uses import trainable

ReductionOf = Callable[[nn.Parameter], Reduction | None]
"""How a parameter's gradient is reduced; None: not at all."""


class Replicas:
    """Reduces each bucket right after the slot that completes its last gradient of the step.

    Args:
        reductions: Says of the parameters that the module holds at its call how the gradient of each is reduced.
        collectives: Takes note of what is launched.
        bucket_bytes: Bytes of gradients at which a bucket is closed.
    """

    def __init__(
        self, reductions: Callable[[], ReductionOf], collectives: Collectives, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._reductions = reductions
        self._reduction_of = reductions()
        self._collectives = collectives
        self._bucket_bytes = bucket_bytes
        self._pending: list[Pending] = []
        self._buckets: dict[tuple[bool, ...], tuple[Bucket, ...]] = {}
        self._actions: dict[tuple[int, tuple[bool, ...]], tuple[Plan, Actions]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Bound to the parameters of one model."""
        raise TypeError("a chunk with data parallelism cannot be copied: copy it first, then make the copies parallel")

    def bound(self) -> None:
        """See DataParallel.bound."""
        self._reduction_of = self._reductions()
        self._buckets.clear()
        self._actions.clear()

    def keep_reduced(self, program: Program) -> None:
        """See DataParallel.keep_reduced. The mean of equal gradients is theirs, but not of an expert's few ranks."""
        for bucket in self.buckets(program):
            undo_division(bucket)

    def begin(self, program: Program, plans: Sequence[Plan], lanes: Lanes, *, reduce: bool) -> Lanes:
        """See DataParallel.begin."""
        self._pending = []
        return ActingLanes(lanes, self.actions(program, plans[-1])) if reduce else lanes

    def actions(self, program: Program, last: Plan) -> Actions:
        """The reductions of a step's last plan, made once per plan and set of trainable parameters."""
        key = (id(last), trainable(program))
        if key not in self._actions:
            gradients = last_gradients(last)
            actions = Actions()
            for bucket in self.buckets(program):
                place = max(gradients[stage] for stage in bucket.stages)
                actions.add_after(last.issues[place], partial(self._start, bucket))
            self._actions[key] = (last, actions)
        return self._actions[key][1]

    def around(self, program: Program, runs: Sequence[ChunkRun], *, reduce: bool) -> Sequence[Actions]:
        """See DataParallel.around."""
        around = [Actions() for _ in runs]
        plans = [run.plan for run in runs]
        for bucket in self.buckets(program) if reduce else ():
            moments = gradients_of(plans, frozenset(bucket.stages))
            if moments:
                last = max(moments)
                around[last].add_after(plans[last].issues[moments[last]], partial(self._start, bucket))
        return around

    def buckets(self, program: Program) -> tuple[Bucket, ...]:
        """The buckets of the parameters that train now."""
        key = trainable(program)
        if key not in self._buckets:
            self._buckets[key] = make_buckets(program, self._reduction_of, self._bucket_bytes)
        return self._buckets[key]

    def end(self) -> None:
        """Wait for the reductions in the order in which they began."""
        for pending in self._pending:
            pending.finish()
        self._pending = []

    def abandon(self) -> None:
        """Forget the reductions: the buffers live on in the handles until these have ended."""
        self._pending = []

    def whole(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()

    def after_microbatch(self, program: Program, *, last: bool) -> None:
        """Reduce the same buckets one after the other, nothing beside them."""
        for bucket in self.buckets(program) if last else ():
            self._begin(bucket).finish()

    def local(self, tensor: Tensor) -> Tensor:
        """The tensor: every rank holds all of it."""
        return tensor

    def parameter_groups(self, module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
        """One group."""
        return [{"params": list(module.parameters())}]

    def _start(self, bucket: Bucket) -> None:
        self._pending.append(self._begin(bucket))

    def _begin(self, bucket: Bucket) -> Pending:
        self._collectives.record("all_reduce", "gradients", bucket.parameters[0])
        return start_reduction(bucket)
