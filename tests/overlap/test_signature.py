from __future__ import annotations

from overlap.orders import get_order
from overlap.plan import Planner, PlanRequest
from overlap.signature import comm_signature
from recompute import RecomputeConfig
from tests.overlap.programs import dummy_program


def test_communication_is_listed_in_issue_order_by_the_steps_numbers() -> None:
    program = dummy_program("M")
    planner = Planner(program, get_order("plain"), delayed=False)
    rule, trained = RecomputeConfig.uniform(1), program.trained()
    plans = [
        (planner.plan(PlanRequest(rule if ahead is not None else None, rule if behind is not None else None, trained)),
         ahead, behind)
        for ahead, behind in ((0, None), (1, 0), (None, 1))
    ]  # fmt: skip
    backward = ["B{}.0.combine", "R{}.0.dispatch", "B{}.0.dispatch"]
    assert comm_signature(plans) == (
        "N0.0.dispatch", "N0.0.combine", "N1.0.dispatch", "N1.0.combine",
        *(slot.format(0) for slot in backward), *(slot.format(1) for slot in backward),
    )  # fmt: skip
