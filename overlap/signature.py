"""comm_signature: the communication of a step as text, so that ranks can compare it before they communicate (R9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from overlap.ir import Lane, Op
from overlap.lower import Plan
from overlap.plan import FORWARD_SIDE
from recompute.config import Keep


def comm_signature(plans: Iterable[tuple[Plan, int | None, int | None]]) -> tuple[str, ...]:
    """The communication slots of a step in issue order, by the microbatches' numbers in the step.

    Args:
        plans: A step's plans, each with the microbatches that run forward and backward in it.
    """
    signature: list[str] = []
    for plan, forward, backward in plans:
        for issue in plan.issues:
            number = forward if issue.slot.microbatch == FORWARD_SIDE else backward
            gathers = issue.slot.op is Op.LOAD and issue.keep is Keep.SHARDED
            if (issue.lane is Lane.COMM or gathers) and number is not None:
                signature.append(str(replace(issue.slot, microbatch=number)))
    return tuple(signature)
