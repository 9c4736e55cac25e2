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
        (planner.plan(PlanRequest(rule if 1 in numbers else None, rule if 0 in numbers else None, trained)), numbers)
        for numbers in ({1: 0}, {1: 1, 0: 0}, {0: 1})
    ]
    backward = ["B{}.0.combine", "R{}.0.dispatch", "B{}.0.dispatch"]
    assert comm_signature(plans) == (
        "N0.0.dispatch", "N0.0.combine", "N1.0.dispatch", "N1.0.combine",
        *(slot.format(0) for slot in backward), *(slot.format(1) for slot in backward),
    )  # fmt: skip
