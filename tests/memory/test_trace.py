"""Traces: where a slot's highest point lies, whoever else holds what dies in it."""

from __future__ import annotations

from overlap.memory.refs import Ref, Source
from overlap.memory.trace import Window, highest, make_trace

PIECE = Ref(Source.PIECE)
EVENTS = [(10, None), (-4, None), (0, PIECE), (7, None), (-7, None), (1, None)]


def test_windows_end_where_something_dies() -> None:
    assert make_trace(EVENTS) == (Window(10, 6, PIECE), Window(7, 1, None))
    assert make_trace([]) == (Window(0, 0, None),)


def test_a_death_counts_where_nobody_else_holds() -> None:
    trace = make_trace(EVENTS)
    assert highest(trace, 100, {}) == 113
    assert highest(trace, 100, {PIECE: 5}) == 110
    assert highest((), 100, {}) == 100
