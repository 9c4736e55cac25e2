from __future__ import annotations

import torch

from overlap import train_step
from overlap.parallel.collective_log import CollectiveLog, NoLog
from tests.overlap.programs import tiny_chunk, tiny_feeds


def test_entries_name_operation_purpose_type_and_width_but_no_count() -> None:
    logs = [CollectiveLog() for _ in range(2)]
    for rows, log in zip((3, 5), logs, strict=True):
        log.record("all_to_all", "tokens", torch.empty(rows, 4, 2, dtype=torch.bfloat16))
        log.record("all_reduce", "loss", torch.empty(rows))
    assert logs[0].entries == ["all_to_all tokens bfloat16 [4x2]", "all_reduce loss float32 [1]"]
    assert logs[0].digest() == logs[1].digest()
    logs[1].record("all_reduce", "loss", torch.empty(1))
    assert logs[0].digest() != logs[1].digest()
    logs[1].clear()
    assert logs[1].digest() == CollectiveLog().digest()
    NoLog().record("all_reduce", "loss", torch.empty(1))


def test_a_slot_that_issues_is_named_by_its_microbatch_in_the_step() -> None:
    log = CollectiveLog()

    class Issues:
        def before(self, issue, owner) -> None:
            if issue.slot.stage == "dispatch":
                log.record("all_to_all", "rows", torch.empty(1, 2))

        def after(self, issue, owner) -> None:
            return

    train_step(tiny_chunk("M"), tiny_feeds(2), observers=(log, Issues()))
    log.record("all_reduce", "report", torch.empty(1))
    assert log.entries == [
        "F0.0.dispatch all_to_all rows float32 [2]", "F1.0.dispatch all_to_all rows float32 [2]",
        "B0.0.dispatch all_to_all rows float32 [2]", "B1.0.dispatch all_to_all rows float32 [2]",
        "all_reduce report float32 [1]",
    ]  # fmt: skip
