"""One verdict over ranks."""

from __future__ import annotations

from dataclasses import replace

from overlap.verify import TensorsCompared, Verdict, merged

GOOD = Verdict(
    loss_equal=True,
    gradients=TensorsCompared(compared=3, different=()),
    buffers=TensorsCompared(compared=2, different=()),
    rng_equal=True,
    max_live_segments=1,
)


def test_ranks_are_equal_together() -> None:
    assert merged([GOOD]) == merged([GOOD, GOOD]) == GOOD


def test_one_rank_that_differs_counts() -> None:
    b = TensorsCompared(compared=3, different=("b",))
    bad = replace(GOOD, gradients=b, max_live_segments=2)
    assert merged([GOOD, bad, replace(GOOD, gradients=TensorsCompared(compared=3, different=("a",)))]) == replace(
        GOOD, gradients=TensorsCompared(compared=3, different=("a", "b")), max_live_segments=2
    )
    for field in ("loss_equal", "rng_equal"):
        assert not merged([GOOD, replace(GOOD, **{field: False})]).equal
    assert not merged([GOOD, replace(GOOD, buffers=b)]).equal
