"""comm_signature: the communication of a step as text, so that ranks can compare it before they communicate (R9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from overlap.ir import Lane, Op
from overlap.plan import StepPlan
from recompute.config import Keep


def comm_signature(plans: Iterable[StepPlan]) -> tuple[str, ...]:
    """The communication slots of a step in issue order, by the microbatches' numbers in the step.

    Args:
        plans: A step's plans.
    """
    signature: list[str] = []
    for plan, numbers in plans:
        for issue in plan.issues:
            gathers = issue.slot.op is Op.LOAD and issue.keep is Keep.SHARDED
            if issue.lane is Lane.COMM or gathers:
                signature.append(str(replace(issue.slot, microbatch=numbers[issue.slot.microbatch])))
    return tuple(signature)
