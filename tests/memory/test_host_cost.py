"""The engine's own time on the host."""

from __future__ import annotations

from overlap.memory import measure_host_cost


def test_host_cost_is_within_its_goals() -> None:
    """R19: 15 us per slot, 200 ms for a pair of 61-layer chunks; twice that here, for the machine has other work."""
    cost = measure_host_cost(repeats=5)
    assert cost.own_us < 30
    assert cost.stage_us > 0
    assert cost.plan_ms < 400
    assert cost.cached_plan_us < 1000
    assert cost.as_json()["own_us"] == cost.own_us
    # 8 layers and a head, 4 microbatches: 5 N, 3 R (combine and post elided) and 5 B per layer, F and B of the head.
    assert cost.slots == 4 * (8 * (5 + 3 + 5) + 2)
