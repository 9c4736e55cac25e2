"""Sharded: parameters live in shards, are brought together around their use, and gradients are scattered (FSDP2).

A group of parameters is together from the first issue of a plan that reads it to the last that needs it, the next
group is on its way meanwhile. A replay brings its segment together again; with hidden replays two segments are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from overlap.ir import Program
from overlap.lanes import Lanes
from overlap.lower import Plan
from overlap.parallel.actions import ActingLanes, Actions
from overlap.parallel.data import ChunkRun
from overlap.parallel.fsdp import ParameterGroup, finish_step
from overlap.parallel.moments import gradients_of, last_gradients, visits
from overlap.parallel.replicas import Replicas
from overlap.parallel.shards import local, parameter_groups
from overlap.parallel.uses import Uses, trainable, uses_of
from recompute.errors import ConfigError


class Sharded:
    """Drives the groups of one sharded model.

    Args:
        root: The outermost sharded module.
        groups: Its groups.
        rest: Reduces the gradients of parameters that are not sharded (experts that this rank alone holds).
        keep_together: Whether all groups are there for the whole step.
    """

    def __init__(
        self, root: FSDPModule, groups: Sequence[ParameterGroup], rest: Replicas, *, keep_together: bool = False
    ) -> None:
        self.groups = tuple(groups)
        self._root = root
        self._rest = rest
        self._keep_together = keep_together
        self._sharded_types = self._types()
        self._uses: dict[tuple[bool, ...], Uses] = {}
        self._actions: dict[tuple[tuple[int, ...], Uses, bool], tuple[Sequence[Plan], Actions]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Bound to one model."""
        raise TypeError("a sharded chunk cannot be copied: copy it first, then shard the copies")

    def bound(self) -> None:
        """See DataParallel.bound; groups follow their modules by themselves, in all but the types they gather in.

        Raises:
            ConfigError: A parameter has another type.
        """
        types = self._types()
        if types != self._sharded_types:
            rule = "sharded parameters keep the type they were sharded in: convert before make_parallel()"
            raise ConfigError(field="dtype", value=sorted(map(str, set(types))), rule=rule)
        self._uses.clear()
        self._actions.clear()
        self._rest.bound()

    def keep_reduced(self, program: Program) -> None:
        """See DataParallel.keep_reduced; FSDP2 adds to gradients of shards what it has reduced."""
        self._rest.keep_reduced(program)

    def begin(self, program: Program, plans: Sequence[Plan], lanes: Lanes, *, reduce: bool) -> Lanes:
        """See DataParallel.begin."""
        uses = self.uses(program)
        for number in uses.held:
            self.groups[number].gather()
        key = (tuple(map(id, plans)), uses, reduce)
        if key not in self._actions:
            self._actions[key] = (tuple(plans), self._make_actions(plans, uses, reduce=reduce))
        return ActingLanes(self._rest.begin(program, plans, lanes, reduce=reduce), self._actions[key][1])

    def around(self, program: Program, runs: Sequence[ChunkRun], *, reduce: bool) -> Sequence[Actions]:
        """See DataParallel.around. A group is reduced after its last gradient of the step, in whatever run that is."""
        uses = self.uses(program)
        around = self._rest.around(program, runs, reduce=reduce)
        for number, planned in enumerate(uses.planned):
            self._add_moments(around, runs, number, planned, uses, reduce=reduce)
        self._hold(around, runs, uses)
        for actions, run in zip(around, runs, strict=True):
            self._add_visits(actions, run.plan, uses)
        return around

    def uses(self, program: Program) -> Uses:
        """What the stages use of the groups, as parameters are trainable now."""
        flags = trainable(program)
        if flags not in self._uses:
            uses = uses_of(program, [group.parameters for group in self.groups])
            every = frozenset(range(len(self.groups)))
            self._uses[flags] = replace(uses, held=every) if self._keep_together else uses
        return self._uses[flags]

    def end(self) -> None:
        """Scatter what the whole step held, wait for the gradients."""
        self._scatter_all()
        finish_step(self._root, self.groups)
        self._rest.end()

    def abandon(self) -> None:
        """Scatter everything and drop gradients that were not reduced."""
        for group in self.groups:
            group.forget()
        self._rest.abandon()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Bring everything together."""
        for group in self.groups:
            group.gather()
        try:
            yield
        finally:
            self._scatter_all()

    def after_microbatch(self, program: Program, *, last: bool) -> None:
        """Add up every group's gradients; at the last microbatch reduce them, nothing beside them."""
        for group, planned in zip(self.groups, self.uses(program).planned, strict=True):
            if planned:
                group.backward_done(planned, reduce=last)
        if last:
            finish_step(self._root, self.groups)
        self._rest.after_microbatch(program, last=last)

    def local(self, tensor: Tensor) -> Tensor:
        """The shard."""
        return local(tensor)

    def parameter_groups(self, module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
        """One group per layout."""
        return parameter_groups(module)

    def _types(self) -> tuple[torch.dtype, ...]:
        return tuple(parameter.dtype for group in self.groups for parameter in group.parameters)

    def _scatter_all(self) -> None:
        for group in self.groups:
            group.scatter()

    def _add_moments(
        self,
        around: Sequence[Actions],
        runs: Sequence[ChunkRun],
        number: int,
        planned: frozenset[int],
        uses: Uses,
        *,
        reduce: bool,
    ) -> None:
        """Say when gradients of a group are complete: some of a microbatch's, all of them, all of the step's."""
        moments = gradients_of([run.plan for run in runs], uses.givers[number])
        whole = {runs[place].backward: place for place in moments}
        for place, at in moments.items():
            # where backward is cut in two, what the first half leaves out is still to come: no zeros in its stead
            filled = planned if whole[runs[place].backward] == place else frozenset[int]()
            done = partial(self.groups[number].backward_done, filled, reduce=reduce and place == max(moments))
            around[place].add_after(runs[place].plan.issues[at], done)

    def _hold(self, around: Sequence[Actions], runs: Sequence[ChunkRun], uses: Uses) -> None:
        """Say when groups that stay together until the step's end are brought together: before their first use."""
        for number in uses.held:
            first = next(
                (
                    (actions, issue)
                    for actions, run in zip(around, runs, strict=True)
                    for issue in run.plan.issues
                    if number in uses.groups.get(issue.stage.key, ())
                ),
                None,
            )
            if first is not None:
                actions, issue = first
                actions.add_before(issue, self.groups[number].gather)

    def _make_actions(self, plans: Sequence[Plan], uses: Uses, *, reduce: bool) -> Actions:
        actions = Actions()
        for plan in {id(plan): plan for plan in plans}.values():
            self._add_gradients(actions, plan, uses, reduce=reduce and plan is plans[-1])
            self._add_visits(actions, plan, uses)
        return actions

    def _add_gradients(self, actions: Actions, plan: Plan, uses: Uses, *, reduce: bool) -> None:
        """Say when a microbatch's gradients of a group are complete."""
        gradients = last_gradients(plan)
        for number, planned in enumerate(uses.planned):
            places = [gradients[stage] for stage in uses.givers[number] if stage in gradients]
            if places:
                done = partial(self.groups[number].backward_done, planned, reduce=reduce)
                actions.add_after(plan.issues[max(places)], done)

    def _add_visits(self, actions: Actions, plan: Plan, uses: Uses) -> None:
        """Say when a group is brought together, with the next one on its way, and when it is scattered again."""
        found = visits(plan, uses.groups, uses.held)
        for place, visit in enumerate(found):
            group = self.groups[visit.group]
            actions.add_before(plan.issues[visit.first], group.gather)
            for after in found[place + 1 : place + 2]:
                actions.add_before(plan.issues[visit.first], self.groups[after.group].prefetch)
            actions.add_after(plan.issues[visit.last], group.scatter)
