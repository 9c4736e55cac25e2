"""Moments: after which issue of a plan gradients are complete, and between which issues parameters are used.

Plan-time facts about stages and the groups of parameters that they read; what is done at a moment is not known here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from overlap.ir import Op, StageKey
from overlap.lower import Plan

_GIVES_GRADIENTS = (Op.BACKWARD, Op.WGRAD)
_COPIES = (Op.STORE, Op.LOAD)
"""Slots that move what a stage wrote, on a lane of their own: no parameter is read."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A stretch of a plan's issues during which a group of parameters must be there."""

    group: int
    first: int
    """Place of the first issue that reads them."""
    last: int
    """Place of the last issue that reads them or adds to their gradients."""


def last_gradients(plan: Plan) -> dict[StageKey, int]:
    """Per stage that runs backward in a plan, the place of its last B or W: its parameters' gradients are there then.

    Delayed gradients of a shared parameter are there with the backward of the stage that writes it, which is later.
    """
    return {issue.stage.key: place for place, issue in enumerate(plan.issues) if issue.slot.op in _GIVES_GRADIENTS}


def gradients_of(plans: Sequence[Plan], givers: Container[StageKey]) -> dict[int, int]:
    """Which of the plans give gradients of some stages, by place in the order in which they run.

    Args:
        plans: One may stand at several places.
        givers: The stages.

    Returns:
        Per such place, the place in the plan of the issue that completes what it gives.
    """
    found = {id(plan): [at for key, at in last_gradients(plan).items() if key in givers] for plan in plans}
    return {place: max(found[id(plan)]) for place, plan in enumerate(plans) if found[id(plan)]}


def visits(plan: Plan, groups: Mapping[StageKey, tuple[int, ...]], held: Container[int] = ()) -> tuple[Visit, ...]:
    """When the groups of parameters are used in a plan, in order of first use.

    A microbatch that runs forward visits a group once; so does one that runs backward, from its replay (or its
    backward) to its last weight gradient. Weight gradients alone, whose inputs' gradients another plan gave,
    are a visit too: a stage may read its weight there (the chunked loss does). Visits that overlap are one.

    Args:
        plan: The issues.
        groups: Per stage, the groups whose parameters it reads.
        held: Groups that are there for the whole step, and visited by nobody.
    """
    stretches: dict[tuple[int, int], Visit] = {}
    for place, issue in enumerate(plan.issues):
        if issue.slot.op in _COPIES:
            continue
        for group in groups.get(issue.stage.key, ()):
            if group in held:
                continue
            who = (group, issue.slot.microbatch)
            begun = stretches.get(who)
            stretches[who] = Visit(group, place if begun is None else begun.first, place)
    merged: dict[int, list[Visit]] = {}
    for visit in sorted(stretches.values(), key=lambda visit: visit.first):
        own = merged.setdefault(visit.group, [])
        if own and visit.first <= own[-1].last:
            own[-1] = Visit(visit.group, own[-1].first, max(own[-1].last, visit.last))
        else:
            own.append(visit)
    return tuple(sorted((visit for own in merged.values() for visit in own), key=lambda visit: visit.first))
