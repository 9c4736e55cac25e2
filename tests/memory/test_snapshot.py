"""The snapshot's observer names every slot, and what lies between."""

from __future__ import annotations

from overlap.memory.snapshot import SlotSnapshot
from overlap.step import step_plans, train_step
from tests.memory.compare import decoder, tokens, uniform


def test_allocations_are_tagged_with_their_slot() -> None:
    tags: list[str] = []
    chunk = decoder(uniform(1), layers=1)
    train_step(chunk, tokens(2), observers=(SlotSnapshot(tags.append),))
    slots = [issue.slot for plan, _ in step_plans(chunk, 2) for issue in plan.issues]
    assert len(tags) == 2 * len(slots)
    assert set(tags[1::2]) == {"between slots"}
    assert {"N0.0.attn", "R1.0.experts", "B1.head"} <= set(tags[::2])
